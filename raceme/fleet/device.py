"""`raceme device`: one process that keeps its ClientApp, torch and data, and answers messages.

It speaks the protocol of Flower's SuperNodes, and works with a stock SuperLink beside them. A
SuperNode starts a new Python process for every message; this process answers all messages.
"""

from __future__ import annotations

import logging
import os
import random
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
from cryptography import x509

from raceme.core.errors import UserError, os_errors_as_user_errors, printable
from raceme.core.options import Value
from raceme.core.signals import StopSignal, ends_at_hang_up
from raceme.datasets.npz import CLIENT, DATA_FILE
from raceme.datasets.npz import read as read_data
from raceme.fleet.tasks import DEVICE_ID, Apps, Interrupter, Invitations, TaskRunner, Trust, When
from raceme.flower import fleet_client as fleet
from raceme.flower.fleet_client import Endpoint, Link, RejoinError, knows_key
from raceme.flower.fleet_protocol import LONGEST_WAIT, OWN_APP, Keys, generate_keys, own_greeting

log = logging.getLogger("raceme.device")

# -----------------------------------------------------------------------------
# A file that is touched while the SuperLink answers, for a container's health check.
# -----------------------------------------------------------------------------


_INTERVAL_SECONDS = 5.0


class HealthFile:
    """Touches a file while the SuperLink answers: an age above two minutes indicates a problem.

    Answers to heartbeats count, so that long training does not look like a problem.

    Parameters
    ----------
    path : Path
        File to touch; created if missing.

    Raises
    ------
    UserError
        It cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._touched_at = float("-inf")
        with os_errors_as_user_errors(f"The health file '{path}' cannot be written"):
            # Removed and created below, which would destroy a device file.
            if path.exists() and not path.is_file():
                raise UserError(f"The health file '{path}' is not a regular file.")
            path.unlink(missing_ok=True)
            path.touch()
            path.unlink()

    def answered(self) -> None:
        """Note that the SuperLink has answered."""
        now = time.monotonic()
        if now - self._touched_at >= _INTERVAL_SECONDS:
            self._touched_at = now
            # A full disk or a missing folder must not stop training.
            with suppress(OSError):
                self._path.touch()


def checked_model_file(path: Path) -> str:
    """Check the path of the file for the device's model; return it for the ClientApp.

    Raises
    ------
    UserError
        Nothing can be written there.
    """
    path = path.expanduser().absolute()
    if path.exists() and not path.is_file():
        raise UserError(f"The model file '{path}' is not a regular file.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(
            f"The model file '{path}' cannot be written: its folder is missing or belongs to "
            f"another user."
        )
    return str(path)


def check_data_file(node: Mapping[str, Value], trust: Trust) -> None:
    """Check the file with the device's data, if any, at the start.

    For another app than Raceme's it may have any content.

    Raises
    ------
    UserError
        It is missing; or Raceme's app, if no other is trusted, cannot read it.
    """
    path = Path(str(node.get(DATA_FILE, "")))
    if path == Path() or CLIENT in path.name:
        return
    try:
        read_data(path)
    except UserError as error:
        if trust.apps == (OWN_APP,) or not path.is_file():
            raise
        log.warning("Raceme's app could not use the data file: %s", error)


# -----------------------------------------------------------------------------
# A limit to the memory of this process.
# -----------------------------------------------------------------------------


_MIB = 1024 * 1024


def limit_memory(mebibytes: int) -> None:
    """Let allocations beyond a limit fail, in this process only.

    The limit counts the process's own data (heap, stacks, private writable mappings), not libraries
    and address space: torch reserves many times more address space than it uses, which is why
    ``RLIMIT_AS`` would be useless. A task that needs more fails with an error reply, and the device
    continues.

    Parameters
    ----------
    mebibytes : int
        Largest size of the process's own data, in MiB.

    Raises
    ------
    UserError
        This process already uses more.
    """
    used = data_memory() // _MIB
    if mebibytes <= used:
        raise UserError(
            f"A memory limit of {mebibytes} MiB is too low: the device itself uses {used} MiB "
            f"before any training."
        )
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (mebibytes * _MIB, hard))


def data_memory() -> int:
    """Return the bytes of this process's own data, which the limit counts."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise UserError("A memory limit needs Linux: this system does not report memory use.")


# -----------------------------------------------------------------------------
# TLS on the device: trusted authorities, and diagnosis of failed handshakes.
# -----------------------------------------------------------------------------


_FAILED = ("handshake failed", "certificate_verify_failed", "hostname verification check failed")
"""Errors of gRPC for a connection that fails until its configuration is changed."""
_BY_TIME = (
    ("certificate has expired", "has expired", "make a new one on the server"),
    (
        "certificate is not yet valid",
        "is not valid yet",
        "set the time, or if it is right, make a new one where the clock is right",
    ),
)
_PLAIN, _FORGED = "wrong_version_number", "bad_signature"


def read_authority(path: Path) -> bytes:
    """Read the certificates of the authorities that a device trusts.

    gRPC itself accepts a file without certificates, and then fails at every attempt to connect.

    Parameters
    ----------
    path : Path
        One or several certificates in PEM format.

    Raises
    ------
    UserError
        The file cannot be read, or holds something other than certificates.
    """
    with os_errors_as_user_errors(f"The certificate '{path}' cannot be read"):
        data = path.expanduser().read_bytes()
    try:
        x509.load_pem_x509_certificates(data)
    except ValueError:
        raise UserError(
            f"'{path}' is not a certificate in PEM format: give the ca.crt that `raceme certs` "
            "wrote, or the PEM file of the authority that signed the SuperLink's."
        ) from None
    return data


def temporary_tls_error(text: str, address: str) -> str | None:
    """Return a problem with a server's certificate that may pass without a change of the device.

    A certificate may be renewed on the server, and a board without a battery sets its clock some
    time after its start.

    Parameters
    ----------
    text : str
        Error message of gRPC, which contains that of the TLS handshake.
    address : str
        Address of the SuperLink, ``HOST:PORT``, for the messages.

    Returns
    -------
    str or None
        None for errors that do not concern the connection's security.

    Raises
    ------
    UserError
        Every connection will fail until the device's configuration changes.
    """
    said, now = text.lower(), f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    for trouble, what, remedy in _BY_TIME:
        if trouble in said:
            clock = f"it is {now} by this device's clock"
            return f"the certificate of {address} {what} ({clock}): {remedy}"
    if not any(part in said for part in _FAILED):
        return None
    if _PLAIN in said:
        why = "it speaks no TLS: start it with certificates, or for a test use --insecure"
    elif "hostname" in said:
        host = address.rpartition(":")[0]
        why = (
            f"its certificate does not name '{host}': use a name that it has, or make one with "
            f"`raceme certs --host {host}`"
        )
    elif "certificate" in said or _FORGED in said:
        why = (
            "its certificate does not come from the authority in --root-certificates (without "
            "that option: from a public one)"
        )
    else:
        why = "the TLS handshake failed, possibly because of its certificate"
    raise UserError(f"{address} is not the expected SuperLink: {why}. ({_detail(text)})")


def _detail(text: str) -> str:
    """Return the end of gRPC's message, the part that differs between errors."""
    found = re.search(r"(OPENSSL_internal:|Custom verification).*", text, re.DOTALL)
    return " ".join((found[0] if found else text).split())[:200]


# -----------------------------------------------------------------------------
# Pauses between attempts.
# -----------------------------------------------------------------------------


_JITTER = 0.2
"""Largest relative deviation of a pause from its nominal length."""


class Pause:
    """A pause with jitter that grows from one attempt to the next until it is reset.

    Jitter spreads the attempts of devices that lost their server at the same moment.

    Parameters
    ----------
    shortest, longest : float
        Bounds in seconds, before jitter.
    growth : float
        Factor from one pause to the next.
    uniform : Callable
        Returns a random number between two bounds.
    """

    def __init__(
        self,
        shortest: float,
        longest: float,
        growth: float = 1.5,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._shortest = shortest
        self._longest = longest
        self._growth = growth
        self._uniform = uniform
        self._next = shortest

    def next(self) -> float:
        """Return the seconds to wait now."""
        seconds = self._next
        self._next = min(seconds * self._growth, self._longest)
        return seconds * self._uniform(1 - _JITTER, 1 + _JITTER)

    def reset(self) -> None:
        """Start with the shortest pause again."""
        self._next = self._shortest


# -----------------------------------------------------------------------------
# A device's connection to a SuperLink, which outlives network loss and restarts.
# -----------------------------------------------------------------------------


_DEADLINE_SECONDS = 120.0
"""Longest time for one call, enough for the largest object of a model on a slow link."""
_PULL_DEADLINE_SECONDS = 20.0
_LEAVE_DEADLINE_SECONDS = 3.0

_Code = grpc.StatusCode
_PASSING = {_Code.UNAVAILABLE, _Code.DEADLINE_EXCEEDED, _Code.RESOURCE_EXHAUSTED, _Code.ABORTED}
# An overloaded gRPC server cancels calls; joining again would increase the load.
_PASSING |= {_Code.CANCELLED}
_PUZZLING = {_Code.INTERNAL, _Code.UNKNOWN, _Code.DATA_LOSS}
_REFUSED = {_Code.UNAUTHENTICATED, _Code.FAILED_PRECONDITION}
_PUZZLING_TRIES = 5
"""Tries of a call that fails for no stated reason; the node then joins anew."""
_TOO_LARGE = "message larger than max"
_SPEAKS_HTTP = ("http1.x server", "missing selected ALPN property")
"""Error of gRPC for a server that speaks HTTP/1.1."""
_NEVER_SENT = ("failed to connect", "connection refused", "resolution", "no route", "unreachable")


class StoppedError(Exception):
    """The device was told to stop while it waited for the network."""


class RunOverError(Exception):
    """The SuperLink accepts no more messages for this run."""


class NotAcceptedError(Exception):
    """The SuperLink does not know the node's key, or another node with it is online."""


class OtherTransportError(Exception):
    """The SuperLink speaks HTTP, not gRPC."""


class PatientCalls:
    """Repeats calls that failed for a passing reason, until the device is told to stop.

    Attributes
    ----------
    leaving : bool
        Whether the connection is being closed: calls are made once, with a short deadline.
    pull_failed : bool
        True if a request for the next message failed after it may have reached the SuperLink,
        which hands a message out only once.
    answered : Callable
        Called after every answer of the SuperLink.
    """

    def __init__(
        self, stop: StopSignal, endpoint: Endpoint, answered: Callable[[], None] = lambda: None
    ) -> None:
        self.leaving = False
        self.pull_failed = False
        self._stop = stop
        self._endpoint = endpoint
        self._address = endpoint.address
        self._answered = False
        self.answered = answered

    def invoke(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `target` with a deadline; see `raceme.flower.fleet_client.Calls`."""
        request = args[0]
        pull = fleet.is_pull(request)
        pause = Pause(0.5, 20.0, growth=1.7)
        tries, arrived = 0, False
        while True:
            tries += 1
            latency = self._endpoint.latency
            if self.leaving:
                kwargs["timeout"] = _LEAVE_DEADLINE_SECONDS * latency
            else:
                deadline = _PULL_DEADLINE_SECONDS if pull else _DEADLINE_SECONDS
                kwargs.setdefault("timeout", deadline * latency)
            try:
                result = target(*args, **kwargs)
            except grpc.RpcError as error:
                if self.leaving:
                    raise
                reason = self._temporary_error(error, tries)
                arrived |= not _never_sent(error)
                self.pull_failed |= pull and arrived
                if tries == 1:
                    log.warning("%s", reason)
                if self._stop.wait(pause.next()):
                    raise StoppedError from None
            else:
                if tries > 1:
                    log.info("%s can be reached again", self._address)
                if arrived and fleet.is_object_push(request):
                    # The SuperLink refuses a part that arrived although the answer was lost.
                    result.stored = True
                self._answered = True
                self.answered()
                return result

    def wait_for(self, call: grpc.Future) -> bool:
        """Wait for the end of a call or a reason to stop; return whether the call has ended."""
        reader, writer = os.pipe()
        try:
            done = threading.Event()

            def tell(_call: grpc.Future) -> None:
                os.write(writer, b"!")
                done.set()

            call.add_done_callback(tell)
            stopped = self._stop.wait_or(reader)
            if stopped:
                call.cancel()
            # The callback writes to the pipe, so it must end before the pipe is closed.
            done.wait()
            return not stopped
        finally:
            os.close(reader)
            os.close(writer)

    def _temporary_error(self, error: grpc.RpcError, tries: int) -> str:
        """Return the description of an error that may pass; raise the others."""
        code, text = error.code(), fleet.error_text(error)
        trouble = temporary_tls_error(text, self._address)
        if trouble is not None:
            return trouble
        if code is _Code.PERMISSION_DENIED:
            raise RunOverError(text)
        if code in _REFUSED and "timestamp" in text.lower():
            # Boards without a battery start with a wrong clock until a time server answers.
            return f"{self._address} does not accept this device's clock: set the time"
        if code is _Code.UNAUTHENTICATED:
            if "node id" in text.lower():
                raise RejoinError(f"{self._address} does not know this node any more")
            if "supernode authentication" in text.lower():
                # Flower's HTTP API does not say which of its checks has failed.
                if self._answered:
                    raise RejoinError(f"{self._address} does not know this node any more")
                return f"{self._address} does not accept this device's key, or its clock"
            raise UserError(f"{self._address} refuses this device's key: {_one_line(text)}")
        if code is _Code.FAILED_PRECONDITION:
            if "must be registered" in text:
                raise UserError(
                    f"{self._address} takes only devices with a registered key: pass --key FILE, "
                    "and give the server its public key (of a stock SuperLink: "
                    "'flwr supernode register')."
                )
            if "activate" in text:
                raise NotAcceptedError(text)
            raise UserError(f"{self._address} refuses this device: {_one_line(text)}")
        if code is _Code.UNIMPLEMENTED:
            over = "HTTP" if self._endpoint.transport == fleet.HTTP else "gRPC"
            raise UserError(
                f"{self._address} is not a Fleet API over {over}: give the address of the "
                "SuperLink's Fleet API (before Flower 1.40 with --fleet-api-type grpc-rere)."
            )
        if any(part in text for part in _SPEAKS_HTTP):
            raise OtherTransportError
        reason = _one_line(text)
        if _TOO_LARGE in text:
            raise RejoinError(f"{self._address} refuses a reply of this size: {reason}")
        if code not in _PASSING and (code not in _PUZZLING or tries >= _PUZZLING_TRIES):
            raise RejoinError(f"{code.name}: {reason}")
        if self._endpoint.insecure and not self._answered and "Socket closed" in reason:
            reason += "; perhaps it requires TLS: then leave out --insecure"
        if self._endpoint.transport == fleet.HTTP and not self._answered:
            reason += "; perhaps it speaks gRPC: then use --transport grpc"
        return f"{self._address} cannot be reached, trying again: {reason}"


def join(
    endpoint: Endpoint,
    keys: Keys,
    stop: StopSignal,
    *,
    register: bool,
    answered: Callable[[], None] = lambda: None,
    device: str = "",
) -> AbstractContextManager[Link]:
    """Go online as one node of a SuperLink within the context, and offline at its end.

    Parameters
    ----------
    endpoint : Endpoint
        Address and certificates of the SuperLink.
    keys : Keys
        Key pair of the node.
    stop : StopSignal
        Ends every wait for the network.
    register : bool
        Whether to register the node with the SuperLink first, and unregister it at the end.
    answered : Callable
        Called after every answer of the SuperLink, from several threads.
    device : str
        Configured id of the device; empty without one.
    """
    calls = PatientCalls(stop, endpoint, answered)
    return fleet.connect(endpoint, keys, calls, register=register, device=device)


def _never_sent(error: grpc.RpcError) -> bool:
    """Return whether a call failed before anything was sent."""
    text = fleet.error_text(error).lower()
    return error.code() is _Code.UNAVAILABLE and any(part in text for part in _NEVER_SENT)


def _one_line(text: str) -> str:
    return printable(" ".join(text[:1000].split()), 200)


# -----------------------------------------------------------------------------
# `raceme device`: one process that keeps its ClientApp, torch and data, and answers messages.
# -----------------------------------------------------------------------------


_SHORTEST_PAUSE = 0.02
_LONGEST_PAUSE = 2.0
"""Bounds in seconds of the pause between two requests for work."""
_ABSENCE_SECONDS = 12.0
"""Time offline after which every strategy has noticed that a node left; they check every 5 s."""
_LINGER_SECONDS = 3.5
"""Time to stay online after a reply. A SuperLink discards the replies of an offline node, and
Flower's own strategies fetch replies every 3 s."""
_WHY_NOT = {
    False: "this key is not registered: copy its .pub file to certs/devices of the server, and "
    "device-keys, if the server has that file (stock SuperLink: flwr supernode register)",
    True: "an earlier process of this device, or another one with its key, counts as online",
}
"""Reason why a SuperLink does not let a node go online, by whether it knows the node's key."""


@dataclass(frozen=True)
class DeviceOptions:
    """Options of a device.

    Attributes
    ----------
    endpoint : Endpoint
        Address and certificates of the SuperLink.
    keys : Callable, optional
        Returns the registered key pair, which is read again each time the device joins; by default
        the device makes and registers a key.
    node_config : Mapping
        Node configuration for the ClientApp. Without ``device-id`` the device has the id of its key
        at the server; without that and ``partition-id``, the host's name.
    trust : Trust
        Apps, models and files that the owner allows; by default all.
    memory_limit : int or None
        Limit of the process's own data, in MiB.
    grace : float
        Seconds that a task may continue after the device is told to stop.
    health_file : Path or None
        Touched while the SuperLink answers.
    when : When
        When the device accepts invitations to train.
    """

    endpoint: Endpoint
    keys: Callable[[], Keys] | None = None
    node_config: Mapping[str, Value] = field(default_factory=dict)
    trust: Trust = field(default_factory=Trust)
    memory_limit: int | None = None
    grace: float = 5.0
    health_file: Path | None = None
    when: When = field(default_factory=When)


def run_device(options: DeviceOptions) -> None:
    """Answer messages until SIGTERM, SIGINT or, unless it is ignored, SIGHUP.

    The current task is then finished, or answered with an error reply, and the node goes offline. A
    second SIGTERM or SIGINT ends the task and the wait at once.

    Raises
    ------
    UserError
        The SuperLink will never accept this device, or an option is impossible.
    """
    check_data_file(options.node_config, options.trust)
    # Loaded before the device goes online, so that it can work at once and errors appear at the
    # start. Torch takes most of the process's memory, so it is loaded before the limit is checked.
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
            # A terminal that is closed may send SIGHUP several times.
            if number == signal.SIGHUP:
                return
            hurry.set()
        stop.set()
        interrupter.stop()

    numbers = [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if ends_at_hang_up() else [])]
    for number in numbers:
        signal.signal(number, on_signal)
    with closing(apps):
        invitations = Invitations(options.when)
        tasks = TaskRunner(apps, options.node_config, interrupter, invitations)
        _stay_online(options, tasks, stop, hurry)
    log.info("offline")


def _stay_online(
    options: DeviceOptions, tasks: TaskRunner, stop: StopSignal, hurry: StopSignal
) -> None:
    """Join, answer messages, and join again, until told to stop."""
    pause = Pause(1.0, 30.0, growth=1.7)
    health = None if options.health_file is None else HealthFile(options.health_file)
    answered = (lambda: None) if health is None else health.answered
    register = options.keys is None
    registered: Keys | None = None
    absent = False
    endpoint = options.endpoint
    while not stop.is_set():
        # A key stands for one node. A device without a registered key joins again as a new node, so
        # that the strategy sees at once that the old node's work is lost.
        if options.keys is not None:
            try:
                registered = options.keys()
            except UserError:
                # While the file is being written, the device keeps its former key.
                if registered is None:
                    raise
        keys = registered or generate_keys()
        try:
            given = str(options.node_config.get(DEVICE_ID, ""))
            with join(
                endpoint, keys, stop, register=register, answered=answered, device=given
            ) as link:
                tasks.name_device("" if link.server is None else link.server.device)
                pause.reset()
                if absent:
                    absent = False
                    raise RejoinError("an earlier process of this device was online until now")
                log.info("online at %s as node %d", endpoint.address, link.node_id)
                if link.server is not None and (
                    difference := link.server.difference(own_greeting())
                ):
                    log.warning("the server has %s", difference)
                _serve(link, tasks, stop)
                log.info("stopping")
                hurry.wait(tasks.answered_at + _LINGER_SECONDS - time.monotonic())
        except NotAcceptedError:
            # A node that was just registered has never been online, so there is no absence to
            # notice.
            absent = knows_key(endpoint, keys) is not False
            seconds = pause.next()
            log.warning("not accepted: %s; next try in %.0f s", _WHY_NOT[absent], seconds)
            stop.wait(seconds)
        except OtherTransportError:
            if endpoint.transport != fleet.AUTO:
                raise UserError(
                    f"{endpoint.address} speaks HTTP, as SuperLinks of Flower 1.40 and later do: "
                    "use --transport http, or leave the option out."
                ) from None
            endpoint = replace(endpoint, transport=fleet.HTTP)
            log.info("%s speaks HTTP", endpoint.address)
        except RejoinError as error:
            log.warning("joining again: %s", error)
            # A node that was offline receives its messages again.
            tasks.invitations.drop()
            # With a registered key the node keeps its id; the strategy must notice its absence
            # first.
            stop.wait(pause.next() if register else _ABSENCE_SECONDS)
        except StoppedError:
            return


def _serve(link: Link, tasks: TaskRunner, stop: StopSignal) -> None:
    """Request work: at once after a reply, and less and less often while there is none.

    A server that lets devices wait for work is asked again at once. Invitations are accepted
    meanwhile when they are due.
    """
    pause = Pause(_SHORTEST_PAUSE, _LONGEST_PAUSE)
    while not stop.is_set():
        try:
            received = link.receive(min(LONGEST_WAIT, tasks.invitations.next_in()))
            if received is not None:
                tasks.answer(link, *received)
            if tasks.handle_due_invitation(link) or received is not None:
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
