"""`raceme device`: one process that keeps its ClientApp, torch and data, and answers messages.

It speaks the protocol of Flower's SuperNodes, and works against a stock SuperLink side by side
with them. A SuperNode starts a new Python process for every message; this one does not.
"""

from __future__ import annotations

import logging
import resource
import signal
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from raceme.core.errors import UserError
from raceme.core.options import Value
from raceme.core.signals import StopSignal, heeds_hang_up
from raceme.fleet.connection import NotAcceptedError, Pause, RunOverError, StoppedError, join
from raceme.fleet.tasks import Apps, Interrupter, Invitations, Tasks, Trust, When
from raceme.flower import fleet_client as fleet
from raceme.flower.fleet_client import (
    LONGEST_WAIT,
    Endpoint,
    Keys,
    Link,
    RejoinError,
    knows_key,
)

# -----------------------------------------------------------------------------
# A file that is touched while the SuperLink answers, for a container's health check.
# -----------------------------------------------------------------------------


_INTERVAL_SECONDS = 5.0


class HealthFile:
    """Keeps a file young: whoever finds it older than two minutes knows that something is wrong.

    Heartbeats count, so that long training does not look like trouble.

    Parameters
    ----------
    path : Path
        The file; made if need be.

    Raises
    ------
    UserError
        It cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._touched_at = float("-inf")
        try:
            # It is removed and made again: a device would be gone.
            if path.exists() and not path.is_file():
                raise UserError(f"The health file '{path}' is no regular file.")
            path.unlink(missing_ok=True)
            path.touch()
            path.unlink()
        except OSError as error:
            raise UserError(
                f"The health file '{path}' cannot be written: {error.strerror}."
            ) from None

    def answered(self) -> None:
        """Note that the SuperLink has answered."""
        now = time.monotonic()
        if now - self._touched_at >= _INTERVAL_SECONDS:
            self._touched_at = now
            # A disk that is full, or a folder that is gone, is no reason to stop training.
            with suppress(OSError):
                self._path.touch()


# -----------------------------------------------------------------------------
# A limit to the memory of this process.
# -----------------------------------------------------------------------------


_MIB = 1024 * 1024


def limit_memory(mebibytes: int) -> None:
    """Let allocations beyond a limit fail, in this process only.

    The limit counts the process's own data (heap, stacks, private writable mappings), not
    libraries and address space: torch reserves many times more address space than it uses, which
    is why ``RLIMIT_AS`` would be useless. A task that needs more fails with an error reply, and
    the device goes on.

    Parameters
    ----------
    mebibytes : int
        The limit in MiB.

    Raises
    ------
    UserError
        This process needs more already.
    """
    used = data_memory() // _MIB
    if mebibytes <= used:
        raise UserError(
            f"A memory limit of {mebibytes} MiB is too low: the device itself needs {used} MiB "
            "before any training."
        )
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (mebibytes * _MIB, hard))


def data_memory() -> int:
    """Return the bytes of this process's own data, which the limit counts."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise UserError("A memory limit needs Linux: this system does not state the memory in use.")


# -----------------------------------------------------------------------------
# `raceme device`: one process that keeps its ClientApp, torch and data, and answers messages.
# -----------------------------------------------------------------------------


log = logging.getLogger("raceme.device")

_SHORTEST_PAUSE = 0.02
_LONGEST_PAUSE = 2.0
"""Bounds in seconds of the pause between two requests for work."""
_ABSENCE_SECONDS = 12.0
"""Time offline after which every strategy has noticed that a node left: it looks every 5 s."""
_LINGER_SECONDS = 3.5
"""Time online after a reply. A SuperLink throws the replies of a node away as soon as it is
offline, and Flower's own strategies look for them every 3 s."""
_WHY_NOT = {
    False: "this key is not registered with the SuperLink (flwr supernode register)",
    True: "an earlier process of this device, or another one with its key, counts as online",
}
"""Why a SuperLink does not let a node go online, by whether it knows its key."""


@dataclass(frozen=True)
class DeviceOptions:
    """What a device is told when it starts.

    Attributes
    ----------
    endpoint : Endpoint
        The SuperLink.
    keys : Keys or None
        The registered key pair; without one the device registers a key of its own making.
    node_config : Mapping
        What its ClientApp is told about the device, ``device-id`` among it.
    trust : Trust
        Which apps may run, and what of them; by default all.
    memory_limit : int or None
        MiB of data that the process may hold.
    grace : float
        Seconds that a task has left once the device is told to stop.
    health_file : Path or None
        Touched while the SuperLink answers.
    when : When
        When the device accepts invitations to train.
    """

    endpoint: Endpoint
    keys: Keys | None = None
    node_config: Mapping[str, Value] = field(default_factory=dict)
    trust: Trust = field(default_factory=Trust)
    memory_limit: int | None = None
    grace: float = 5.0
    health_file: Path | None = None
    when: When = field(default_factory=When)


def run_device(options: DeviceOptions) -> None:
    """Answer messages until SIGTERM, SIGINT or, unless it is ignored, SIGHUP.

    The task in work is then finished, or returned with an error reply, and the node goes offline;
    a second SIGTERM or SIGINT hurries both.

    Raises
    ------
    UserError
        The SuperLink will never take this device, or an option cannot be met.
    """
    # A device is online when it can begin to work, not some seconds before; what cannot work is
    # said at once. Torch is most of what the process holds: it counts in the memory's limit.
    import raceme.client_app  # noqa: F401
    from raceme.training.machine import ways_of

    apps = Apps(options.trust, options.node_config)
    if options.memory_limit is not None:
        limit_memory(options.memory_limit)
    ways_of(options.node_config)
    stop, hurry = StopSignal(), StopSignal()
    interrupter = Interrupter(options.grace)

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            # A terminal that is closed may send its signal several times.
            if number == signal.SIGHUP:
                return
            hurry.set()
        stop.set()
        interrupter.stop()

    numbers = [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if heeds_hang_up() else [])]
    for number in numbers:
        signal.signal(number, on_signal)
    with closing(apps):
        invitations = Invitations(options.when)
        tasks = Tasks(apps, options.node_config, interrupter, invitations)
        _stay_online(options, tasks, stop, hurry)
    log.info("offline")


def _stay_online(options: DeviceOptions, tasks: Tasks, stop: StopSignal, hurry: StopSignal) -> None:
    """Join, answer, and join again, until told to stop."""
    pause = Pause(1.0, 30.0, growth=1.7)
    health = None if options.health_file is None else HealthFile(options.health_file)
    answered = (lambda: None) if health is None else health.answered
    register = options.keys is None
    absent = False
    while not stop.is_set():
        # A key stands for one node: who joins again without a registered one is a new node,
        # and the strategy sees at once that the old one's work is lost.
        keys = options.keys or fleet.generate_keys()
        try:
            with join(options.endpoint, keys, stop, register=register, answered=answered) as link:
                pause.reset()
                if absent:
                    absent = False
                    raise RejoinError("an earlier process of this device was online until now")
                log.info("online at %s as node %d", options.endpoint.address, link.node_id)
                _serve(link, tasks, stop)
                log.info("stopping")
                hurry.wait(tasks.answered_at + _LINGER_SECONDS - time.monotonic())
        except NotAcceptedError:
            # A node that has only just been registered was never there: nobody has to miss it.
            absent = knows_key(options.endpoint, keys) is not False
            seconds = pause.next()
            log.warning("not accepted: %s; next try in %.0f s", _WHY_NOT[absent], seconds)
            stop.wait(seconds)
        except RejoinError as error:
            log.warning("joining again: %s", error)
            # A node that was away is sent anew what it was sent before.
            tasks.invitations.drop()
            # With a registered key the node keeps its id, and has to be missed first.
            stop.wait(pause.next() if register else _ABSENCE_SECONDS)
        except StoppedError:
            return


def _serve(link: Link, tasks: Tasks, stop: StopSignal) -> None:
    """Ask for work, often after a reply and less and less often while there is none.

    A server that lets devices wait for work is asked again at once. Invitations that are held are
    accepted meanwhile, when the device wishes.
    """
    pause = Pause(_SHORTEST_PAUSE, _LONGEST_PAUSE)
    while not stop.is_set():
        try:
            received = link.receive(min(LONGEST_WAIT, tasks.invitations.next_in()))
            if received is not None:
                tasks.answer(link, *received)
            if tasks.follow_wish(link) or received is not None:
                pause.reset()
                continue
            if link.waited:
                continue
        except RunOverError as error:
            log.info("the run is over; its message is dropped (%s)", error)
        stop.wait(min(pause.next(), tasks.invitations.next_in()))
    try:
        tasks.return_invitations(link)
    except RunOverError as error:
        log.info("the run is over; its invitation is dropped (%s)", error)
