"""A device's work: trusted apps, invitations, and replies to messages."""

from __future__ import annotations

import hashlib
import logging
import math
import platform
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from raceme import __version__
from raceme.core.config import RunConfig, expanded, general_keys, registry_of
from raceme.core.errors import UserError, quoted
from raceme.core.files import Stamp
from raceme.core.messages import (
    CONFIG,
    INVITATION,
    KIND,
    LOSSES,
    NUMBERS,
    ON,
    REFUSED,
    TASK,
    error_line,
    from_array,
    functions_in,
    reason_of,
)
from raceme.core.options import Value, names_in
from raceme.core.registry import DEVICES, STRATEGIES, users_line
from raceme.datasets.npz import stamp_of
from raceme.flower import app as bundles
from raceme.flower import fleet_client as fleet
from raceme.flower.fleet_client import Link, RejoinError
from raceme.flower.fleet_protocol import OWN_APP, SINCE
from raceme.flower.messages import (
    CLIENT_APP_RAISED_EXCEPTION,
    INVALID_APP,
    LOAD_APP_EXCEPTION,
    MESSAGE_UNAVAILABLE,
    NODE_UNAVAILABLE,
    Run,
    identify_process,
)

# -----------------------------------------------------------------------------
# Trust: the apps, models and data that a device's owner allows.
# -----------------------------------------------------------------------------


_MODEL = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_OWNERS = ("data-root", "data-file", "download")
"""Keys that select a device's files and downloads."""


class RefusedAppError(Exception):
    """An app is refused on this device.

    Attributes
    ----------
    code : int
        Flower's code for the error reply.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True)
class Trust:
    """The apps, models and data that a device's owner allows.

    Without trusted apps, any app of the server runs, with the rights of the device's user.
    Otherwise only trusted apps run; as Raceme's own app imports the model and reads the files that
    a run names, these need permission too.

    Attributes
    ----------
    apps : tuple[str, ...]
        Trusted apps, as publisher/name; empty allows everything.
    models : tuple[str, ...]
        Objects, as ``module:function``, that a run may import besides Raceme's own and those
        declared by installed packages.

    Raises
    ------
    UserError
        An app or model is malformed, or there are models without apps.
    """

    apps: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.apps:
            if name.count("/") != 1:
                raise UserError(
                    f"'{name}' is not an app: expected PUBLISHER/NAME, for example "
                    f"--trusted-app {OWN_APP}"
                )
        for model in self.models:
            if not _MODEL.fullmatch(model):
                raise UserError(
                    f"'{model}' is not a model of your own: expected MODULE:FUNCTION, for example "
                    "--trusted-model my_models:build. Raceme's own need no trust."
                )
        if self.models and not self.apps:
            raise UserError(
                "--trusted-model has no effect without --trusted-app, since any app may then run "
                f"its own code: add --trusted-app {OWN_APP}."
            )

    def check_app(self, name: str) -> None:
        """Raise RefusedAppError if an app may not run."""
        if self.apps and name not in self.apps:
            raise RefusedAppError(INVALID_APP, f"the app {name} is not trusted on this device")

    def check_run(self, run: Mapping[str, Value], node: Mapping[str, Value]) -> None:
        """Refuse a run of Raceme's own app that would import or read what the owner does not allow.

        Parameters
        ----------
        run : Mapping
            Run configuration from the server.
        node : Mapping
            Node configuration of the device's owner.

        Raises
        ------
        RefusedAppError
            The run names an object or file that is not allowed.
        UserError
            The configuration cannot be read.
        """
        if not self.apps:
            return
        keys = expanded(run)
        for key, item in general_keys().items():
            registry = registry_of(key)
            # Strategies and devices are imported on the server only.
            if registry in (None, STRATEGIES, DEVICES):
                continue
            for name in names_in(item, keys.get(key, "")):
                if ":" in name and name not in self.models and name not in registry.installed():
                    raise RefusedAppError(
                        INVALID_APP,
                        f"the {key} {quoted(name)} is not trusted on this device: its owner allows "
                        "one with --trusted-model MODULE:FUNCTION",
                    )
        # Only now, because reading a dataset's options imports it.
        RunConfig.from_mapping(keys, lenient=True)
        for key in _OWNERS:
            if keys.get(key) not in (None, "", False, "false") and key not in node:
                raise RefusedAppError(
                    INVALID_APP,
                    f"{key} is set by this device's owner in --node-config, but this run sets it "
                    f"to {quoted(keys[key])}",
                )

    def check_work(self, message: Message) -> None:
        """Raise RefusedAppError for a message with untrusted client work."""
        for name in functions_in(message) if self.apps else ():
            if name not in self.models:
                raise RefusedAppError(
                    INVALID_APP,
                    f"the client work {quoted(name)} is not trusted on this device: its owner "
                    "allows one with --trusted-model MODULE:FUNCTION",
                )


# -----------------------------------------------------------------------------
# Loading of ClientApps, checked against their run.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadedRun:
    """A run's ClientApp and configuration.

    Attributes
    ----------
    series_id : int
        Runs of one series share a client's state.
    is_own : bool
        Whether it is Raceme's own.
    """

    app: ClientApp
    config: dict[str, Value]
    series_id: int
    is_own: bool = False


class Apps:
    """Loads a run's ClientApp from the SuperLink's app bundle.

    Raceme's own app is never loaded from a bundle: the installed one runs if its version matches.
    Other apps are unpacked into a folder of this process from the verified bytes; one is kept at a
    time.

    Parameters
    ----------
    trust : Trust, optional
        Permissions of the device's owner; by default everything.
    node : Mapping, optional
        Node configuration of the owner.
    """

    def __init__(self, trust: Trust | None = None, node: Mapping[str, Value] | None = None) -> None:
        self._trust, self._node = trust or Trust(), dict(node or {})
        self._runs: dict[int, LoadedRun] = {}
        self._foreign: tuple[str, ClientApp] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def of_run(
        self, run_id: int, describe: Callable[[int], Run], fetch: Callable[[Run], bytes]
    ) -> LoadedRun:
        """Return the ClientApp and the configuration of a run.

        Parameters
        ----------
        describe : Callable
            Returns the SuperLink's description of the run.
        fetch : Callable
            Returns the bytes of a run's app bundle.

        Raises
        ------
        RefusedAppError
            The app differs from the one announced, is not trusted, or cannot be loaded.
        """
        if run_id not in self._runs:
            run = describe(run_id)
            bundle = fetch(run)
            name, version, reference = _checked(bundle, run)
            config = self._checked_config(name, bundle, run)
            if name == OWN_APP:
                app = _own_app(version)
            else:
                if self._foreign is None or self._foreign[0] != run.fab_hash:
                    self.close()
                    self._foreign = (run.fab_hash, self._load_foreign(reference, bundle))
                app = self._foreign[1]
            if len(self._runs) >= 8:
                del self._runs[next(iter(self._runs))]
            self._runs[run_id] = LoadedRun(app, config, run.series_id, name == OWN_APP)
        return self._runs[run_id]

    def _checked_config(self, name: str, bundle: bytes, run: Run) -> dict[str, Value]:
        """Return a run's configuration if the device's owner allows it."""
        try:
            self._trust.check_app(name)
            config = bundles.run_config(bundle, run)
            if name == OWN_APP:
                self._trust.check_run(config, self._node)
        except RefusedAppError:
            raise
        # The server's input is untrusted.
        except Exception as error:
            reason = f"the run's configuration cannot be read: {type(error).__name__}: {error}"
            raise RefusedAppError(INVALID_APP, reason) from error
        return config

    def check_work(self, loaded: LoadedRun, message: Message) -> None:
        """Raise RefusedAppError for a forbidden message to Raceme's own app."""
        if loaded.is_own:
            self._trust.check_work(message)

    def _load_foreign(self, reference: str, bundle: bytes) -> ClientApp:
        self._folder = tempfile.TemporaryDirectory(prefix="raceme-app-")
        try:
            folder = bundles.install_app(bundle, Path(self._folder.name))
            app = bundles.load_app(reference, folder, ClientApp)
        # An app may raise anything while it is imported, SystemExit included.
        except (Exception, SystemExit) as error:
            reason = f"the app cannot be loaded: {type(error).__name__}: {error}"
            raise RefusedAppError(LOAD_APP_EXCEPTION, reason) from error
        module = sys.modules[reference.partition(":")[0]]
        if not str(module.__file__).startswith(str(folder)):
            raise RefusedAppError(
                LOAD_APP_EXCEPTION,
                f"the app's module '{module.__name__}' has the name of a module that is installed "
                "here",
            )
        return app

    def close(self) -> None:
        """Drop the foreign app, its runs and its modules, whose names the next may reuse."""
        if self._folder is None:
            return
        root = str(Path(self._folder.name).absolute())
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(root):
                del sys.modules[name]
        sys.path[:] = [entry for entry in sys.path if not entry.startswith(root)]
        if self._foreign is not None:
            app = self._foreign[1]
            self._runs = {key: run for key, run in self._runs.items() if run.app is not app}
        self._foreign = None
        self._folder.cleanup()
        self._folder = None


def _checked(bundle: bytes, run: Run) -> tuple[str, str, str]:
    """Return name, version and ClientApp of a bundle that matches the run's announcement."""
    if hashlib.sha256(bundle).hexdigest() != run.fab_hash:
        raise RefusedAppError(
            INVALID_APP, "the app's hash differs from the one that its run announced"
        )
    try:
        name, version, reference = bundles.app_metadata(bundle)
    except Exception as error:
        raise RefusedAppError(INVALID_APP, f"the app bundle cannot be read: {error}") from error
    if (name, version) != (run.fab_id, run.fab_version):
        raise RefusedAppError(
            INVALID_APP,
            f"the app is {name} {version}, but its run announced {run.fab_id} {run.fab_version}",
        )
    return name, version, reference


def _own_app(version: str) -> ClientApp:
    # `raceme serve` names the first release that has its protocol, `flwr run` its own.
    if version not in (SINCE, __version__):
        raise RefusedAppError(
            LOAD_APP_EXCEPTION,
            f"the run is of raceme {version}, this device has {__version__}: install the same",
        )
    from raceme.client_app import app, forget

    # One run at a time: another has other settings and reloads its data.
    forget()
    return app


# -----------------------------------------------------------------------------
# Invitations to train, which a device holds until a time or a rise of its loss.
#
# A server that lets devices decide sends training messages with the setting ``invitation``; the
# device keeps their model.
# -----------------------------------------------------------------------------


log = logging.getLogger("raceme.device")

AT_ONCE, INTERVAL, POISSON, DRIFT = "at-once", "interval", "poisson", "drift"

_SECONDS = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}
_RISE = 0.1
_MOST_FAILURES = 5
"""Number of consecutive failed measurements after which a device trains."""
_EXPECTED = "at-once, interval=60s, poisson=60s, drift or drift=10%"


@dataclass(frozen=True)
class When:
    """The policy by which a device accepts invitations.

    Attributes
    ----------
    mode : str
        ``"at-once"``, ``"interval"``, ``"poisson"`` or ``"drift"``.
    seconds : float
        Interval for ``"interval"``, mean wait for ``"poisson"``, time between two measurements of
        the loss for ``"drift"``.
    rise : float
        Relative rise of the loss, for ``"drift"``.
    """

    mode: str = AT_ONCE
    seconds: float = 0.0
    rise: float = _RISE


def parse_when(text: str, look: str = "10s") -> When:
    """Parse the policy by which a device accepts invitations.

    Parameters
    ----------
    text : str
        ``at-once``, ``interval=60s``, ``poisson=5min``, ``drift`` or ``drift=10%``.
    look : str
        Time between two measurements of the loss, for ``drift``.

    Raises
    ------
    UserError
        The text is invalid.
    """
    mode, given, value = text.strip().partition("=")
    if mode in (INTERVAL, POISSON) and given:
        return When(mode, _seconds(value, f"--when {mode}"))
    if mode == DRIFT:
        return When(mode, _seconds(look, "--look"), _share(value) if given else _RISE)
    if mode == AT_ONCE and not given:
        return When()
    raise UserError(f"--when '{text}' cannot be read: expected {_EXPECTED}.")


def _seconds(text: str, name: str) -> float:
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(s|min|h|)", text.strip())
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not (seconds > 0 and math.isfinite(seconds)):
        raise UserError(f"{name} must be a time above 0 such as 30s, 5min or 2h, got '{text}'.")
    return seconds


def _share(text: str) -> float:
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*%", text.strip())
    if not found:
        raise UserError(f"--when drift must be a share such as 10%, got '{text}'.")
    return float(found[1]) / 100


@dataclass
class PendingInvitation:
    """A pending invitation.

    Attributes
    ----------
    message : Message
        The complete message, answered when due.
    expires_at : float
        Time at which the server's message expires, on the device's clock.
    due_at : float
        Time at which the device acts on it.
    looks : bool
        Whether it then measures the loss instead of training.
    known : float or None
        Lowest loss of its model; None before the first measurement.
    failures : int
        Number of consecutive failed measurements of the loss.
    """

    message: Message
    expires_at: float
    due_at: float
    looks: bool = False
    known: float | None = None
    failures: int = 0

    @property
    def run_id(self) -> int:
        """Id of its run."""
        return self.message.metadata.run_id


class Invitations:
    """Pending invitations of a device, at most one per run.

    Parameters
    ----------
    when : When
        Policy of acceptance.
    clock : Callable
        Monotonic clock in seconds.
    rng : random.Random, optional
        Generator of waits and phases, so that devices do not act simultaneously.
    """

    def __init__(
        self,
        when: When,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._when, self._clock = when, clock
        self._rng = rng or random.Random()
        self._held: dict[int, PendingInvitation] = {}
        self._trained: dict[int, tuple[Stamp | None, float]] = {}
        self._first = clock() + self._rng.uniform(0, when.seconds)

    def take(self, message: Message) -> bool:
        """Hold a message if it is an invitation that is not accepted at once."""
        record = message.content.get(CONFIG)
        settings = record if isinstance(record, ConfigRecord) else ConfigRecord()
        if self._when.mode == AT_ONCE or settings.get(INVITATION) is not True:
            return False
        now, metadata = self._clock(), message.metadata
        # Not expired, whatever the device's clock says: the SuperLink delivers no expired messages.
        age = time.time() - metadata.created_at
        lasts = metadata.ttl - (age if 0 <= age < metadata.ttl else 0.0)
        former = self._held.get(metadata.run_id)
        held = PendingInvitation(message, now + lasts, now)
        if self._when.mode == DRIFT:
            held.looks = metadata.run_id in self._trained
        elif former is not None:
            held.due_at = former.due_at
        else:
            held.due_at = self._next_time(now)
        self._held[metadata.run_id] = held
        return True

    def _next_time(self, now: float) -> float:
        """Return the time at which a new invitation is accepted."""
        seconds = self._when.seconds
        if self._when.mode == POISSON:
            return now + self._rng.expovariate(1 / seconds)
        return self._first + max(0, math.ceil((now - self._first) / seconds)) * seconds

    def next_in(self) -> float:
        """Return the seconds until the next one is due, or infinity."""
        due = min((held.due_at for held in self._held.values()), default=math.inf)
        return max(0.0, due - self._clock())

    def due(self) -> PendingInvitation | None:
        """Return a due invitation; drop expired ones."""
        now = self._clock()
        for held in [held for held in self._held.values() if held.expires_at <= now]:
            log.info("run %d: the invitation has expired and is dropped", held.run_id)
            del self._held[held.run_id]
        return next((held for held in self._held.values() if held.due_at <= now), None)

    def decide_by_loss(self, held: PendingInvitation, loss: float, stamp: Stamp | None) -> None:
        """Decide by the loss of the held model whether to train or when to measure again.

        Parameters
        ----------
        held : PendingInvitation
            The invitation with the model.
        loss : float
            Mean loss on the device's current data; NaN if it could not be measured now, infinity if
            it never can.
        stamp : Stamp or None
            State of the device's own data file.
        """
        now = self._clock()
        if math.isnan(loss):
            # The file may just be being replaced. If the problem persists, training fails and the
            # server learns of it.
            held.failures += 1
            held.looks = held.failures < _MOST_FAILURES
            held.due_at = now + self._when.seconds
            return
        held.failures = 0
        if held.known is None:
            # Data replaced since the training are compared with the loss known then.
            trained_on, trained = self._trained[held.run_id]
            moved = stamp != trained_on and math.isfinite(trained)
            held.known = trained if moved else loss
        rises = math.isinf(loss) or loss > (1 + self._when.rise) * held.known
        if math.isinf(loss):
            log.warning("run %d: the ClientApp reports no loss: training immediately", held.run_id)
        elif rises:
            log.info("run %d: the loss rose from %.4g to %.4g", held.run_id, held.known, loss)
        else:
            log.debug("run %d: the loss is %.4g, was %.4g", held.run_id, loss, held.known)
        # Compared with the lowest loss, not the last, so that a slow rise adds up.
        held.known = min(held.known, loss)
        held.looks, held.due_at = not rises, now if rises else now + self._when.seconds

    def accept(self, held: PendingInvitation) -> None:
        """Remove an invitation to train it now."""
        self._held.pop(held.run_id, None)

    def trained(self, run_id: int, loss: float, stamp: Stamp | None) -> None:
        """Record a training for a run.

        Parameters
        ----------
        loss : float
            Loss stated in the reply; NaN if none.
        stamp : Stamp or None
            State of the device's data file at the start of the training.
        """
        self._trained[run_id] = stamp, loss

    def failed(self, run_id: int) -> None:
        """Record a failed training: the next invitation is accepted at once."""
        self._trained.pop(run_id, None)

    def drop(self) -> list[Message]:
        """Remove all invitations and return their messages."""
        messages = [held.message for held in self._held.values()]
        self._held.clear()
        return messages


# -----------------------------------------------------------------------------
# Tasks: calls of the ClientApp with each message, or error replies.
# -----------------------------------------------------------------------------


_SHUTTING_DOWN = "the device is shutting down"
DEVICE_ID = "device-id"
_PARTITION = "partition-id"


class InterruptedTaskError(BaseException):
    """Interrupts a task; no ClientApp should catch it."""


class Interrupter:
    """Ends the current task some time after the device was told to stop.

    Parameters
    ----------
    grace : float
        Seconds that a task has left to finish.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._working = False
        self._stopping = False

    def stop(self) -> None:
        """Let the current task run for the grace period; the second call ends it at once."""
        if self._working and self._stopping:
            raise InterruptedTaskError
        self._stopping = True
        if self._working:
            signal.setitimer(signal.ITIMER_REAL, max(self._grace, 1e-3))

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Mark the time during which a task can be interrupted."""
        previous = signal.signal(signal.SIGALRM, self._on_alarm)
        self._working = True
        try:
            if self._stopping:
                raise InterruptedTaskError
            yield
        finally:
            self._working = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)

    def _on_alarm(self, _signal: int, _frame: FrameType | None) -> None:
        if self._working:
            raise InterruptedTaskError


class TaskRunner:
    """Answers messages with the ClientApps of their runs.

    Parameters
    ----------
    apps : Apps
        Fetches and loads the ClientApp of each run.
    node_config : Mapping
        Node configuration of the device.
    interrupter : Interrupter
        Interrupts the current task when the device is told to stop.
    invitations : Invitations, optional
        Policy for invitations; by default all are accepted at once.

    Attributes
    ----------
    answered_at : float
        Time of the last reply, on the monotonic clock.
    """

    def __init__(
        self,
        apps: Apps,
        node_config: Mapping[str, Value],
        interrupter: Interrupter,
        invitations: Invitations | None = None,
    ) -> None:
        self._apps = apps
        self._node_config = dict(node_config)
        self._is_named = DEVICE_ID in node_config
        self._interrupter = interrupter
        self.invitations = invitations or Invitations(When())
        self.answered_at = float("-inf")
        self._states: dict[int, RecordDict] = {}
        self._folders: dict[int, str] = {}
        self._count = 0

    def name_device(self, name: str) -> None:
        """Set the id of a device without a configured one: that of its key, or the host's name."""
        if self._is_named:
            return
        if name:
            self._node_config[DEVICE_ID] = name
        elif _PARTITION not in self._node_config:
            self._node_config.setdefault(DEVICE_ID, platform.node())

    def answer(self, link: Link, head: Message, fetch: Callable[[], Message]) -> None:
        """Fetch a message and hold it, or compute and send the reply. Log one line.

        Parameters
        ----------
        link : Link
            Connection of the message.
        head : Message
            The message without its content.
        fetch : Callable
            Fetches the content from the SuperLink and returns the complete message.
        """
        started = time.monotonic()
        self._identify(link, head.metadata.run_id)
        try:
            message = fetch()
        except fleet.ObjectPullError as error:
            self._send(link, head, _error(head, MESSAGE_UNAVAILABLE, str(error)), started)
            return
        if message.metadata.message_type == REFUSED:
            # Handled here for every app, also those that do not support this message.
            text = "run %d: the server gives this device no work: %s"
            run_id, extra = message.metadata.run_id, _fields(message)
            log.warning(text, run_id, reason_of(message), extra=extra)
            link.send(Message(RecordDict(), reply_to=message), 0.0)
            return
        if self.invitations.take(message):
            run_id = message.metadata.run_id
            log.info("run %d: %s: invited", run_id, _label(message), extra=_fields(message))
            return
        self._work(link, message, started)

    def handle_due_invitation(self, link: Link) -> bool:
        """Handle a due invitation: measure the loss, or train.

        Returns
        -------
        bool
            Whether one was due.
        """
        held = self.invitations.due()
        if held is None:
            return False
        self._identify(link, held.run_id)
        stamp = stamp_of(self._node_config)
        if held.looks:
            self.invitations.decide_by_loss(held, self._measure_loss(link, held.message), stamp)
            return True
        self.invitations.accept(held)
        reply = self._work(link, held.message, time.monotonic())
        if reply.has_error():
            self.invitations.failed(held.run_id)
        else:
            self.invitations.trained(held.run_id, _stated_loss(reply), stamp)
        return True

    def return_invitations(self, link: Link) -> None:
        """Answer the pending invitations by errors."""
        for message in self.invitations.drop():
            self._identify(link, message.metadata.run_id)
            reply = _error(message, NODE_UNAVAILABLE, _SHUTTING_DOWN)
            self._send(link, message, reply, time.monotonic())

    def _identify(self, link: Link, run_id: int) -> None:
        """Set the run and node of new messages."""
        self._count += 1
        identify_process(run_id, link.node_id, self._count)

    def _work(self, link: Link, message: Message, started: float) -> Message:
        """Compute the reply to a message and send it; return it."""
        try:
            with self._interrupter.interruptible():
                reply = self._call(link, message)
        except InterruptedTaskError:
            reply = _error(message, NODE_UNAVAILABLE, _SHUTTING_DOWN)
        except RefusedAppError as error:
            reply = _error(message, error.code, str(error))
        self._send(link, message, reply, started)
        return reply

    def _send(self, link: Link, message: Message, reply: Message, started: float) -> None:
        """Send a reply, and log one line about it."""
        computed = time.monotonic()
        run_id, label, extra = message.metadata.run_id, _label(message), _fields(message)
        try:
            link.send(reply, computed - started)
        except fleet.ObjectPushError as error:
            text = "run %d: %s: the reply could not be delivered: %s"
            log.warning(text, run_id, label, error, extra=extra)
            # The server learns of the missing reply only when this node leaves.
            raise RejoinError("a reply could not be delivered") from None
        self.answered_at = time.monotonic()
        if reply.has_error():
            text = "run %d: %s: answered with an error: %s"
            log.error(text, run_id, label, error_line(reply), extra=extra)
        else:
            seconds = computed - started
            sent = self.answered_at - computed
            text = "run %d: %s: done in %.2f s, sent in %.2f s"
            log.info(text, run_id, label, seconds, sent, extra=extra)

    def _measure_loss(self, link: Link, message: Message) -> float:
        """Return the loss of a message's model on the device's current training samples.

        Raceme's ClientApp measures it directly, other apps by their own evaluation.

        Returns
        -------
        float
            NaN if it could not be measured, infinity if the ClientApp states none.
        """
        records = dict(message.content.items())
        settings = records.get(CONFIG)
        stated = dict(settings) if isinstance(settings, ConfigRecord) else {}
        records[CONFIG] = ConfigRecord({**stated, KIND: LOSSES, ON: "train"})
        look = Message(RecordDict(records), link.node_id, MessageType.EVALUATE)
        try:
            with self._interrupter.interruptible():
                reply = self._call(link, look, keeps_state=False)
        except (InterruptedTaskError, RefusedAppError):
            return math.nan
        if reply.has_error():
            log.warning("the loss could not be measured: %s", reply.error.reason)
            return math.nan
        numbers = reply.content.array_records.get(NUMBERS)
        if numbers is None or LOSSES not in numbers:
            loss = _stated_loss(reply)
            return math.inf if math.isnan(loss) else loss
        # If several models were sent, the client would train the best one.
        return float(from_array(numbers[LOSSES]).mean(axis=1).min())

    def _call(self, link: Link, message: Message, keeps_state: bool = True) -> Message:
        loaded = self._apps.of_run(message.metadata.run_id, link.run, link.bundle)
        self._apps.check_work(loaded, message)
        state = self._state_of(loaded)
        context = Context(
            run_id=message.metadata.run_id,
            node_id=link.node_id,
            node_config=dict(self._node_config),
            state=state if keeps_state else RecordDict(dict(state)),
            run_config=dict(loaded.config),
            series_id=loaded.series_id,
        )
        try:
            reply = loaded.app(message, context)
        except (Exception, SystemExit) as error:
            log.debug("The ClientApp raised an exception", exc_info=error)
            # Worded as in Flower's own runtime, plus the position in a user's module.
            where = f" ({line})" if (line := users_line(error)) else ""
            reason = f"{type(error)}:<'{error}{where}'>"
            return _error(message, CLIENT_APP_RAISED_EXCEPTION, reason)
        if keeps_state:
            self._states[loaded.series_id] = context.state
        return reply

    def _state_of(self, loaded: LoadedRun) -> RecordDict:
        """Return this client's state for a run, which a resumed run continues.

        For Flower a resumed run is a new run. Its key ``resume`` names the former run's folder, as
        did that run's key ``out`` if it was set.
        """
        series, config = loaded.series_id, loaded.config
        if series not in self._states:
            resumed = str(config.get("resume", ""))
            former = [s for s, folder in self._folders.items() if folder in (resumed, "")]
            taken_up = self._states[former[-1]] if resumed and former else {}
            self._states[series] = RecordDict(dict(taken_up))
            self._folders[series] = resumed or str(config.get("out", ""))
        return self._states[series]


def _error(message: Message, code: int, reason: str) -> Message:
    return Message(Error(code, reason), reply_to=message)


def _label(message: Message) -> str:
    """Return a message's name in the log: its type and the number of a Raceme task."""
    label, number = message.metadata.message_type, _number(message)
    return label if number is None else f"{label} task {number}"


def _fields(message: Message) -> dict[str, dict[str, object]]:
    """Return the fields of a message for a log record."""
    fields = {"request": _number(message), "kind": message.metadata.message_type}
    return {"fields": {"run": message.metadata.run_id, **fields}}


def _number(message: Message) -> int | None:
    record = message.content.get(CONFIG) if message.has_content() else None
    number = record.get(TASK) if isinstance(record, ConfigRecord) else None
    return number if isinstance(number, int) else None


def _stated_loss(reply: Message) -> float:
    """Return the first metric named as a loss; NaN if there is none."""
    records = reply.content.metric_records.values() if reply.has_content() else ()
    losses = (
        float(value)
        for record in records
        for name, value in record.items()
        if "loss" in name and isinstance(value, int | float)
    )
    return next(losses, math.nan)
