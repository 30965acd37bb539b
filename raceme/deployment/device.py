"""`raceme device`: one process that keeps its ClientApp, torch and data, and answers messages.

It speaks the protocol of Flower's SuperNodes, and works against a stock SuperLink side by side
with them. A SuperNode starts a new Python process for every message; this one does not.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from raceme.checkpoints import heeds_hang_up
from raceme.compat import fleet
from raceme.compat.fleet import Endpoint, Keys
from raceme.compat.known_key import knows_key
from raceme.compat.wire import LONGEST_WAIT
from raceme.config import Value
from raceme.deployment.apps import Apps
from raceme.deployment.connection import (
    Link,
    NotAcceptedError,
    RejoinError,
    RunOverError,
    StoppedError,
    join,
)
from raceme.deployment.health import HealthFile
from raceme.deployment.invitations import Invitations, When
from raceme.deployment.memory import limit_memory
from raceme.deployment.polling import Pause
from raceme.deployment.stopping import StopSignal
from raceme.deployment.tasks import Interrupter, Tasks
from raceme.deployment.trust import Trust

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
    apps = Apps(options.trust, options.node_config)
    if options.memory_limit is not None:
        # Torch is the largest part of what the process holds: it counts from the start.
        import raceme.client_app  # noqa: F401

        limit_memory(options.memory_limit)
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
