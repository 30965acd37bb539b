"""Simulation of any Flower app on virtual time: loading, running and recording it."""

from __future__ import annotations

import inspect
import logging
import math
import re
import shlex
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import Strategy

import raceme
from raceme.core.config import RunConfig
from raceme.core.errors import UserError, check_known, one_line
from raceme.core.events import Observer, ignore
from raceme.core.files import check_folder
from raceme.core.messages import CONFIG, KIND, category
from raceme.core.options import SECONDS, Value, convert, option
from raceme.core.registry import STRATEGIES
from raceme.core.scheduling import FlowerArguments
from raceme.core.strategy import Method
from raceme.datasets.source import own_randomness, seed_process, without_operators
from raceme.flower import app as compat
from raceme.flower import installed_flower
from raceme.flower.messages import copy_of
from raceme.records import exchanges
from raceme.records.folder import MESSAGES, STORE, SUMMARY, new_folder
from raceme.records.record import read_run
from raceme.records.store import RunStore
from raceme.records.summary import write_summary
from raceme.reporting.plots import accuracy_figure, clusters_figure
from raceme.reporting.style import save_figure
from raceme.reporting.waiting import timeline_figure, waiting_figure
from raceme.simulation import executor_for, prepare
from raceme.simulation.devices import Workload, bytes_of, training_cost
from raceme.simulation.executor import Executor, Packed, pack, unpack
from raceme.simulation.virtual_grid import Node, VirtualGrid, nodes_of

# -----------------------------------------------------------------------------
# A Flower app in its folder: its ``pyproject.toml``, ServerApp and ClientApp.
# -----------------------------------------------------------------------------


App = TypeVar("App", ServerApp, ClientApp)

_CONFIGURES = ("configure_train", "configure_evaluate")
_AGGREGATES = ("aggregate_train", "aggregate_evaluate")
_METRIC_KEYS = ("accuracy-key", "loss-key")
"""Arguments of a method that an app's own strategy does not have."""


@dataclass(frozen=True)
class FlowerApp:
    """A Flower app that is read but not yet imported.

    Attributes
    ----------
    folder : Path
        Absolute path of the folder with its ``pyproject.toml``.
    name : str
        Name of the project in ``pyproject.toml``.
    server, client : str
        The ServerApp and the ClientApp, as ``module:attribute``.
    run_config : Mapping[str, Value]
        Flower's run config, overrides included.
    """

    folder: Path
    name: str
    server: str
    client: str
    run_config: Mapping[str, Value]

    def load_server(self) -> ServerApp:
        """Import the ServerApp.

        Raises
        ------
        UserError
            It cannot be imported, or needs Flower's older interface.
        """
        app = self._load(self.server, ServerApp)
        if not compat.takes_a_grid(app):
            raise UserError(
                f"The ServerApp of {self.folder} uses server_fn, Flower's older interface, which "
                "waits on the wall clock. Give it an @app.main() function that calls "
                "strategy.start(grid, …); Flower's guide 'Upgrade to Message API' shows how."
            )
        return app

    def load_client(self) -> ClientApp:
        """Import the ClientApp.

        Raises
        ------
        UserError
            It cannot be imported.
        """
        return self._load(self.client, ClientApp)

    def _load(self, reference: str, kind: type[App]) -> App:
        try:
            return without_operators(lambda: compat.load_app(reference, self.folder, kind))
        except compat.LoadAppError as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise UserError(f"{self.folder}/pyproject.toml: {reason}.") from None
        except (Exception, SystemExit) as error:
            if told := self.missing(error, reference):
                raise told from None
            raise UserError(
                f"The app in {self.folder} cannot be imported: {type(error).__name__}: "
                f"{one_line(error) or 'no reason given'} ({_place(error, self.folder)})."
            ) from None

    def missing(self, error: BaseException, reference: str = "") -> UserError | None:
        """Return the error for a missing module, with the command that installs it.

        None for an exception of another kind.
        """
        if not isinstance(error, ImportError):
            return None
        module = error.name or str(error)
        of_flower = module.partition(".")[0] == "flwr"
        if not isinstance(error, ModuleNotFoundError):
            # Python 3.11 has no attribute for the name that the module lacks.
            name = re.search(r"cannot import name '(\w+)'", str(error))
            return self._dropped(f"{module}.{name[1]}") if of_flower and name else None
        own = reference.partition(":")[0]
        if own and (own == module or own.startswith(f"{module}.")):
            return UserError(
                f"{self.folder}/pyproject.toml names '{reference}', and there is no module "
                f"'{module}' in {self.folder}."
            )
        if of_flower:
            return self._dropped(module)
        first = module.partition(".")[0]
        if (self.folder / first).is_dir() or (self.folder / f"{first}.py").is_file():
            return UserError(
                f"The app in {self.folder} imports '{module}', which it does not contain."
            )
        return UserError(
            f"The app in {self.folder} needs the module '{module}', which is not installed: "
            f"python3 -m pip install -e {self.folder} (all that its pyproject.toml asks for)"
        )

    def _dropped(self, name: str) -> UserError:
        """Return the error for a name that the installed release of Flower does not have."""
        return UserError(
            f"The app in {self.folder} imports '{name}', which Flower {installed_flower()[1]} does "
            f"not have: import its replacement, or install the release of Flower that the app was "
            f"written for."
        )


def read_app(folder: Path, overrides: Sequence[str] = ()) -> FlowerApp:
    """Read the app in a folder.

    Parameters
    ----------
    folder : Path
        Folder of the app, with its ``pyproject.toml``.
    overrides : Sequence[str]
        Overrides of its run config in the syntax of ``flwr run --run-config``:
        ``"key=1 other='text'"``, or a TOML file.

    Raises
    ------
    UserError
        There is no Flower app, or a key does not exist.
    """
    folder = folder.expanduser().resolve()
    check_folder(folder, "the folder of a Flower app")
    try:
        project = compat.project_config(folder)
        known = compat.default_config(project)
    except FileNotFoundError:
        raise UserError(
            f"{folder} is not a Flower app: it has no pyproject.toml. `flwr new` makes an app."
        ) from None
    except (ValueError, OSError) as error:
        raise UserError(f"{folder} is not a Flower app: {one_line(error)}") from None
    components = project["tool"]["flwr"]["app"]["components"]
    if not all(isinstance(components.get(name), str) for name in ("serverapp", "clientapp")):
        raise UserError(
            f"{folder}/pyproject.toml names no serverapp and clientapp in "
            "[tool.flwr.app.components]: add them."
        )
    return FlowerApp(
        folder=folder,
        name=str(project["project"]["name"]),
        server=components["serverapp"],
        client=components["clientapp"],
        run_config={**known, **_overrides(overrides, known)},
    )


def _pairs(option: str, texts: Sequence[str]) -> dict[str, Value]:
    """Parse the value of ``--run-config`` or ``--node-config``."""
    try:
        given = compat.parse_pairs(list(texts))
    except (ValueError, OSError) as error:
        raise UserError(f"{option} cannot be read: {one_line(error)}") from None
    if any(text.strip() for text in texts) and not given:
        raise UserError(
            f"{option} takes 'key=value key=value', got '{' '.join(texts)}'; texts are quoted: "
            "key='\"text\"'."
        )
    return given


def _overrides(texts: Sequence[str], known: Mapping[str, Value]) -> dict[str, Value]:
    """Parse the overrides of ``--run-config``; as in Flower, keys must be the app's."""
    given = _pairs("--run-config", texts)
    for name in given:
        check_known("key in --run-config", name, known)
    return given


def _place(error: BaseException, folder: Path) -> str:
    """Return the file and line in an app where an error occurred."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(str(folder))]
    last = (own or frames)[-1]
    return f"{last.filename}:{last.lineno}"


# -----------------------------------------------------------------------------
# Replacement of a Flower app's strategy by one of Raceme's methods.
# -----------------------------------------------------------------------------


def build_method(name: str, parameters: Mapping[str, Value], seed: int, **arguments: Any) -> Method:
    """Make a method by its name.

    Parameters
    ----------
    name : str
        Name of the method in ``raceme list``, or ``module:Class``.
    parameters : Mapping[str, Value]
        Hyper-parameters by dotted key, e.g. ``casa.gamma``.
    seed : int
        Seed of the method's random choices.
    **arguments : Any
        Arguments of Flower's strategies, such as ``fraction_train=0.5``; `parameters` take
        precedence.

    Raises
    ------
    UserError
        There is no such method, or no such hyper-parameter.
    """
    prefix = STRATEGIES.prefix(name)
    parameters = dict(parameters)
    for key in _METRIC_KEYS:
        if key in parameters:
            arguments[key.replace("-", "_")] = str(parameters.pop(key))
    foreign = [key for key in parameters if not key.startswith(prefix)]
    if foreign:
        raise UserError(
            f"--set {foreign[0]}: only keys of the strategy can be set here, as {prefix}KEY, and "
            f"{' and '.join(_METRIC_KEYS)}; the app's own keys go into --run-config."
        )
    config = RunConfig.from_mapping({"strategy": name, "seed": seed, **parameters})
    config.check_options()
    if f"{prefix}fraction" in parameters:
        arguments.pop("fraction_train", None)
    method: Method = STRATEGIES.make(name, config.parameters(), seed=seed, **arguments)
    return method


def arguments_of(strategy: Strategy) -> dict[str, Any]:
    """Return the arguments of an app's strategy that its replacement keeps.

    These are the non-default values of arguments that all of Flower's strategies share.

    Raises
    ------
    UserError
        The strategy configures requests in its own code, which would be lost.
    """
    kind, held = type(strategy), vars(strategy)
    own = [name for name in _CONFIGURES if not compat.is_flowers(getattr(kind, name))]
    reason = f"it has its own {' and '.join(own)}" if own else ""
    for value in held.values():
        if isinstance(value, Strategy):
            reason = f"it wraps {type(value).__name__}"
    if reason:
        raise UserError(
            f"--strategy cannot replace the app's {kind.__name__}: {reason}, which Raceme's "
            "methods do not call. Leave --strategy out, or use a strategy without it in the app."
        )
    return {
        item.name: value
        for item in fields(FlowerArguments)
        if (value := held.get(item.name, item.default)) != item.default
        and not compat.is_flowers(value)
    }


def _ignored_settings(strategy: Strategy) -> list[str]:
    """Return the settings of an app's strategy that its replacement ignores."""
    kind, shared = type(strategy), {item.name for item in fields(FlowerArguments)}
    arguments = [name for name in inspect.signature(kind).parameters if name in vars(strategy)]
    own = [name for name in _AGGREGATES if not compat.is_flowers(getattr(kind, name))]
    return [*(name for name in arguments if name not in shared), *own]


@contextmanager
def replaced(name: str, make: Callable[..., Method], observe: Observer) -> Iterator[list[Method]]:
    """Replace every strategy that the app starts within the context by a method.

    Parameters
    ----------
    name : str
        Name of the method, for messages.
    make : Callable
        Makes the method from the arguments of the strategy.
    observe : Observer
        Receives the events of the first method.

    Returns
    -------
    list[Method]
        Methods started so far; grows during the run.
    """
    methods: list[Method] = []

    def replaced_start(start: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(start)
        def instead(strategy: Strategy, *arguments: Any, **named: Any) -> Any:
            if any(strategy is method for method in methods):
                return start(strategy, *arguments, **named)
            kind, kept, lost = (
                type(strategy).__name__,
                arguments_of(strategy),
                _ignored_settings(strategy),
            )
            try:
                method = make(**kept)
            except UserError as error:
                raise UserError(f"{name} cannot replace {kind}: {error}") from None
            methods.append(method)
            logging.getLogger("flwr").info(
                "%s replaces %s. Kept settings: %s. Unused settings: %s.",
                name,
                kind,
                ", ".join(f"{key}={value}" for key, value in kept.items()) or "nothing",
                ", ".join(lost) or "nothing",
            )
            # An app may override `start` with other argument names, order and extra arguments.
            given = dict(inspect.signature(start).bind_partial(strategy, *arguments).arguments)
            given = {**dict(list(given.items())[1:]), **named}
            known = inspect.signature(method.start).parameters
            passed = {name: value for name, value in given.items() if name in known}
            return method.start(**{**passed, "observe": observe if len(methods) == 1 else ignore})

        return instead

    with ExitStack() as patches:
        for kind in dict.fromkeys(_classes_with_start(Strategy)):
            instead = {"start": replaced_start(kind.__dict__["start"])}
            patches.enter_context(compat.patched(kind, instead))
        yield methods


def _classes_with_start(kind: type[Any]) -> Iterator[type[Any]]:
    """Yield a class and its subclasses that define `start`."""
    if "start" in kind.__dict__:
        yield kind
    for derived in kind.__subclasses__():
        yield from _classes_with_start(derived)


# -----------------------------------------------------------------------------
# The grid of a Flower app's ServerApp, which may poll, pause and never return.
# -----------------------------------------------------------------------------


class Halted(BaseException):
    """Ends a ServerApp that would never return or has reached a limit.

    Not an `Exception`, so that an app's ``except Exception`` does not catch it.
    """


class OtherThreadError(UserError, compat.RunNotRunningException):
    """Raised when another thread than the ServerApp's uses the grid.

    Flower's older driver API looks for nodes in a thread of its own, which ends at the second of
    these exceptions. Before each use it also looks for them in the thread of the ServerApp.
    """


_MOST_ASKS, _MOST_ASKS_OF_CHANGING = 1_000, 100_000
"""Limits of consecutive futile queries by a ServerApp: with a fixed fleet, and with churn."""
_SAME_MOMENT = 100
"""A ServerApp that asks for the nodes more often than this without a pause waits for a change."""


class AppGrid(VirtualGrid):
    """A virtual grid for ServerApps written for the wall clock.

    `send_and_receive` moves the clock to the last reply. `pull_messages` returns the replies
    present and leaves the clock unchanged, so that an app that pauses between polls behaves as on
    real devices; a second poll at the same time moves the clock to the next reply, so that an app
    that polls without pausing progresses. A client that goes offline is noticed after a minute, as
    by Flower's SuperLink.

    Parameters
    ----------
    client_app, nodes, grid
        See :class:`~raceme.simulation.VirtualGrid`.
    max_time : float
        Virtual time in seconds at which the ServerApp is ended.
    free_evaluation : bool
        Whether evaluation costs no time.

    Attributes
    ----------
    is_working : bool
        Whether a call of this grid is in progress, during which code is not the ServerApp's.
    check_training : Callable or None
        Called before training messages are sent; raises to prevent it.
    """

    def __init__(
        self,
        client_app: ClientApp,
        nodes: Sequence[Node],
        *,
        max_time: float = math.inf,
        free_evaluation: bool = True,
        **grid: Any,
    ) -> None:
        super().__init__(client_app, nodes, notice=compat.MISSED_AFTER, **grid)
        self.free_evaluation = free_evaluation
        self.max_time = max_time
        self.check_training: Callable[[], None] | None = None
        self.thread = threading.get_ident()
        self._depth = 0
        # Time of the last futile poll, and the numbers of consecutive futile polls and node
        # queries.
        self._looked_at = -math.inf
        self._futile, self._same_moment = 0, 0

    @property
    def is_working(self) -> bool:
        """Whether a call of this grid is under way."""
        return self._depth > 0

    @property
    def has_no_pending_events(self) -> bool:
        """Whether nothing more happens unless messages are sent."""
        return not self._queue

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages to their nodes at the current time."""
        # Made here, since a generator of the app runs the app's code.
        messages = list(messages)
        with self._work():
            if messages:
                self._note_progress()
            asked = {category(message) for message in messages}
            if self.check_training is not None and MessageType.TRAIN in asked:
                self.check_training()
            return super().push_messages(messages)

    def _pull(self, message_ids: Collection[str]) -> Iterable[Message]:
        """Return the replies present; on a second call at the same time, wait for the next ones."""
        wanted = set(message_ids)
        with self._work():
            # Replies that take no time arrive immediately.
            self.pass_time(0.0)
            coming = any(self._is_coming(key) for key in wanted)
            if coming and self._looked_at == self.now() and not self._ready(wanted):
                self._move_to_reply(wanted)
            replies = [self._arrived.pop(key)[1] for key in self._ready(wanted)]
            if replies or coming:
                self._note_progress()
            else:
                self._count_futile_query("for replies")
            self._looked_at = self.now()
            return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and move the clock until all are answered, or by `timeout` seconds."""
        messages = list(messages)
        with self._work():
            self._note_progress()
            left = self.max_time - self.now()
            is_last = left < math.inf and (timeout is None or left <= timeout)
            timeout = left if is_last else timeout
            replies = list(super().send_and_receive(messages, timeout=timeout))
            if is_last and len(replies) < len(messages):
                raise self._out_of_time()
            return replies

    def wait(self, message_ids: Collection[str], until: float | None = None) -> list[Message]:
        """Move the clock to the next reply; see :class:`~raceme.simulation.VirtualGrid`."""
        with self._work():
            self._note_progress()
            end = self.max_time if until is None else min(until, self.max_time)
            replies = super().wait(message_ids, end)
            if not replies and self.now() >= self.max_time:
                raise self._out_of_time()
            return replies

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that are online now."""
        with self._work():
            if not self._pending:
                self._count_futile_query("which clients are online")
                self._same_moment += 1
                if self._same_moment > _SAME_MOMENT:
                    super().wait(())
            return super().get_node_ids()

    def pause(self, seconds: float) -> None:
        """Advance the clock by a pause of the ServerApp."""
        with self._work():
            self._same_moment = 0
            # The run ends at the limit, not after it.
            self.pass_time(min(max(0.0, seconds), max(0.0, self.max_time - self.now())))
            if self.now() >= self.max_time:
                raise self._out_of_time()

    def _note_progress(self) -> None:
        """Record progress of the ServerApp."""
        self._looked_at = -math.inf
        self._futile = self._same_moment = 0

    @contextmanager
    def _work(self) -> Iterator[None]:
        """Run a call of the ServerApp, up to the time limit at most."""
        if threading.get_ident() != self.thread:
            raise OtherThreadError(
                "The ServerApp uses its grid from several threads: on virtual time it can only "
                "be used from the one that main(grid, context) is called in."
            )
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _out_of_time(self) -> Halted:
        return Halted(
            f"the ServerApp had not returned by {self.max_time:g} s of virtual time (--max-time)"
        )

    def _move_to_reply(self, wanted: set[str]) -> None:
        """Move the clock to the next of some replies and all simultaneous ones."""
        found = self._advance(wanted, self.max_time, stop_on_switch=False)
        if not found:
            raise self._out_of_time()
        for reply in found:
            self._keep(reply.metadata.reply_to_message_id, reply)
        self.pass_time(0.0)

    def _count_futile_query(self, what: str) -> None:
        """Count consecutive futile queries of the ServerApp.

        Raises
        ------
        Halted
            Too many.
        """
        self._futile += 1
        most = _MOST_ASKS if self.has_no_pending_events else _MOST_ASKS_OF_CHANGING
        if self._futile > most:
            raise Halted(
                f"the ServerApp would never return: it has asked {self._futile - 1:,} times in a "
                f"row {what}, and no client has anything to do"
            )


# -----------------------------------------------------------------------------
# The clock that a ServerApp reads: Python's own functions of time, on virtual time.
#
# While the ServerApp runs, `time.sleep` moves the virtual clock, and `time.time`, `time.monotonic`
# and `time.perf_counter` read it, for code of the app itself and of Flower's strategies. All other
# code (a library that waits for a socket, a ClientApp that measures time) uses the machine's clock.
# -----------------------------------------------------------------------------


EPOCH = 1_767_225_600.0
"""`time.time()` at the start of every simulation: 2026-01-01, 00:00 UTC."""

_NANOSECONDS = 1_000_000_000
_CLOCKS = {"time": EPOCH, "monotonic": 0.0, "perf_counter": 0.0}
"""Clock functions and their values at the start."""


class AppClock:
    """Python's functions of time for one ServerApp.

    Parameters
    ----------
    folders : Sequence[Path]
        Where the app's own code is.

    Attributes
    ----------
    grid : AppGrid or None
        Source of the virtual clock; until it is set, all code reads the machine's clock.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.grid: AppGrid | None = None
        self._folders = tuple(f"{folder}/" for folder in (*folders, compat.STRATEGIES_FOLDER))
        self._is_running = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Replace Python's functions within the context.

        Code that imports them by name keeps them; afterwards they behave like Python's.
        """
        replaced: dict[str, Callable[..., Any]] = {"sleep": self._sleep(time.sleep)}
        for name, start in _CLOCKS.items():
            for function, nanoseconds in ((name, False), (f"{name}_ns", True)):
                replaced[function] = self._clock(getattr(time, function), start, nanoseconds)
        self._is_running = True
        try:
            with (
                compat.strategies_pause(self._pause_for_nodes),
                compat.client_managers_wait(self._wait_for),
                compat.patched(time, replaced),
            ):
                yield
        finally:
            self._is_running = False

    def _clock(self, real: Callable[[], Any], start: float, nanoseconds: bool) -> Callable[[], Any]:
        """Make a clock function: virtual time for the app, real time for other code."""

        def virtual() -> Any:
            grid = self._asked_by_app()
            if grid is None:
                return real()
            now = start + grid.now()
            return round(now * _NANOSECONDS) if nanoseconds else now

        return virtual

    def _sleep(self, real: Callable[[float], None]) -> Callable[[float], None]:
        def sleep(seconds: float) -> None:
            grid = self._asked_by_app()
            if grid is None:
                real(seconds)
            elif seconds < 0:
                raise ValueError("sleep length must be non-negative")
            else:
                grid.pause(seconds)

        return sleep

    def _wait_for(self, real: Callable[..., bool]) -> Callable[..., bool]:
        """Make the function with which Flower's older driver API waits for clients.

        Flower's own would wait for a day of real time, in which no simulated client connects.
        """

        def wait_for(manager: Any, num_clients: int, timeout: int = 86400) -> bool:
            grid = self.grid
            if grid is None or threading.get_ident() != grid.thread:
                return real(manager, num_clients, timeout)
            end = grid.now() + timeout
            # Querying the number also registers the clients that are online.
            while manager.num_available() < num_clients and grid.now() < end:
                self._pause_for_nodes(1.0)
            return bool(manager.num_available() >= num_clients)

        return wait_for

    def _asked_by_app(self) -> AppGrid | None:
        """Return the grid if the caller's caller is the ServerApp.

        ClientApp code lies in the same folder but runs inside the grid.
        """
        grid = self.grid
        if grid is None or not self._is_running:
            return None
        if grid.is_working or threading.get_ident() != grid.thread:
            return None
        return grid if sys._getframe(2).f_code.co_filename.startswith(self._folders) else None

    def _pause_for_nodes(self, seconds: float) -> None:
        """Pause while a strategy waits for nodes to connect.

        Raises
        ------
        Halted
            No further node will connect.
        """
        grid = self.grid
        assert grid is not None, "a strategy has been given one"
        if grid.has_no_pending_events:
            online = len(list(grid.get_node_ids()))
            raise Halted(
                "the ServerApp would never return: its strategy waits for more clients than the "
                f"{online} that there are. Try more --clients, or a smaller min_available_nodes, "
                "min_train_nodes or min_evaluate_nodes (in Flower's older strategies "
                "min_available_clients, min_fit_clients, min_evaluate_clients)"
            )
        grid.pause(seconds)


# -----------------------------------------------------------------------------
# The cost of an app's messages on devices, learned from its replies.
# -----------------------------------------------------------------------------


NUM_EXAMPLES = ("num-examples", "num_examples")
"""Metric names of the number of examples in replies of Flower's apps."""
LOCAL_EPOCHS = ("local-epochs", "local_epochs")
"""Their names of the number of epochs in a run config or message."""


@dataclass(frozen=True)
class _Early:
    """A reply computed ahead of time on a copy of the client's state."""

    before: Packed
    reply: Message
    state: RecordDict


class CostLearningExecutor:
    """An executor that learns the cost of messages from replies.

    A training message takes the time given by the device profile plus the transfer of the message
    and of a reply of the size of the client's last one (at first: of the message). If the time
    depends on the number of examples, the client's last reply states it; its first task is computed
    immediately to learn it, and answered when due.

    Parameters
    ----------
    executor : Executor
        Underlying executor.
    nodes : Sequence[Node]
        All nodes of the simulated fleet, with their devices.
    examples : int or None
        Training examples per client; None to learn them.
    evaluation_share : float or None
        Compute time of an evaluation as a share of a training task; None if it takes no time.
    """

    def __init__(
        self,
        executor: Executor,
        nodes: Sequence[Node],
        examples: int | None = None,
        evaluation_share: float | None = None,
    ) -> None:
        self._executor, self._examples = executor, examples
        self._per_sample = {node.node_id: node.device.is_per_sample for node in nodes}
        self._evaluation_share = evaluation_share
        # Learned per client: number of examples, and size of the last reply by message type and
        # stage.
        self._stated: dict[int, int] = {}
        self._bytes_up: dict[tuple[int, str, str], int] = {}
        self._early: dict[str, _Early] = {}
        self._open: dict[str, tuple[Message, Context, float]] = {}

    def cost(self, message: Message, context: Context, examples: int) -> Workload | None:
        """Return the cost of a message for the receiving client's device.

        Raises
        ------
        UserError
            The cost depends on the number of examples, which the client's reply lacks.
        """
        kind = category(message)
        share = {MessageType.TRAIN: 1.0, MessageType.EVALUATE: self._evaluation_share}.get(kind)
        if share is None:
            return None
        node, stage = message.metadata.dst_node_id, compat.secure_stage(message)
        size = bytes_of(message.content)
        known = self._bytes_up.get((node, kind, stage))
        bytes_up = (size if kind == MessageType.TRAIN else 0) if known is None else known
        if stage not in ("", compat.TRAINING_STAGE):
            # Stages that exchange keys and shares do not train.
            return Workload(bytes_down=size, bytes_up=bytes_up, scale=0.0, examples=0)
        if self._per_sample[node] and self._examples is None and node not in self._stated:
            self._compute_early(message, context)
            if node not in self._stated:
                return self._without_examples(message)
        count = self._stated.get(node, 0) if self._examples is None else self._examples
        if KIND in message.content.config_records.get(CONFIG, ()):
            # Requests of Raceme's methods state their cost.
            own = training_cost(message, context, count)
            return None if own is None else own._replace(examples=count)
        return Workload(
            epochs=_epochs(message, context),
            bytes_down=size,
            bytes_up=bytes_up,
            scale=share,
            examples=count,
        )

    def submit(self, message: Message, context: Context, due: float) -> None:
        """Submit a message unless its reply is computed already."""
        message_id = message.metadata.message_id
        self._open[message_id] = message, context, due
        if message_id not in self._early:
            self._executor.submit(message, context, due)

    def result(self, message_id: str) -> Message:
        """Return the reply, and learn from it."""
        message, context, due = self._open.pop(message_id)
        early = self._early.pop(message_id, None)
        if early is None:
            reply = self._executor.result(message_id)
        elif early.before == pack(context.state):
            context.state, reply = early.state, early.reply
        else:
            # Another message has changed the client's state meanwhile.
            self._executor.submit(message, context, due)
            reply = self._executor.result(message_id)
        self._record_reply(message, reply)
        return reply

    def cancel(self, message_id: str) -> None:
        """Drop a message and its result."""
        self._open.pop(message_id, None)
        if self._early.pop(message_id, None) is None:
            self._executor.cancel(message_id)

    def close(self) -> None:
        """Close the executor that does the work."""
        self._executor.close()

    def _compute_early(self, message: Message, context: Context) -> None:
        """Compute a message's reply ahead of time on a copy of its client's state."""
        before, early = pack(context.state), copy(context)
        early.state = unpack(before)
        message_id, content = message.metadata.message_id, copy_of(message.content)
        self._executor.submit(message, early, 0.0)
        reply = self._executor.result(message_id)
        # The client may have modified its message and may have to repeat the work.
        message.content = content
        self._early[message_id] = _Early(before, reply, early.state)
        self._record_reply(message, reply)

    def _record_reply(self, message: Message, reply: Message) -> None:
        """Learn from a client's reply."""
        if reply.has_error():
            return
        node, kind = message.metadata.dst_node_id, category(message)
        self._bytes_up[node, kind, compat.secure_stage(message)] = bytes_of(reply.content)
        stated = _stated_examples(reply.content)
        if kind == MessageType.TRAIN and stated is not None:
            self._stated[node] = stated

    def _without_examples(self, message: Message) -> Workload | None:
        """Return the cost of a task whose reply lacks the number of examples."""
        reply = self._early[message.metadata.message_id].reply
        if reply.has_error():
            # Only the fixed time and the transfers are known.
            return Workload(bytes_down=bytes_of(message.content), examples=0)
        raise UserError(
            "The device profile has times per sample, but the ClientApp's replies lack "
            f"'{NUM_EXAMPLES[0]}' in their metrics: give the number of training samples with "
            "--examples N."
        )


def _epochs(message: Message, context: Context) -> float:
    """Return the epochs of a task, if known."""
    settings: list[Mapping[str, object]] = [*message.content.config_records.values()]
    for values in (*settings, context.run_config):
        for name in LOCAL_EPOCHS:
            value = values.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
                return float(value)
    return 1.0


def _stated_examples(content: RecordDict) -> int | None:
    """Return the number of examples that a reply states."""
    for record in content.metric_records.values():
        for name in NUM_EXAMPLES:
            value = record.get(name)
            if isinstance(value, int | float) and value >= 0:
                return int(value)
    return None


# -----------------------------------------------------------------------------
# Simulation of any Flower app on virtual time: loading, running and recording it.
# -----------------------------------------------------------------------------


_SERVER = 0
"""The ServerApp's number in derived seeds."""


@dataclass(frozen=True)
class Settings:
    """Settings of a simulation.

    Attributes
    ----------
    folder : Path
        Folder of the app, with its ``pyproject.toml``.
    clients : int
        Number of simulated SuperNodes.
    devices : str
        Device profile: a name, a TOML file, ``module:function`` or ``trace:FOLDER``.
    run_config : tuple[str, ...]
        Overrides of the app's run config, as typed.
    strategy : str or None
        Method that replaces the app's strategy.
    parameters : Mapping[str, Value]
        Hyper-parameters of that method by dotted key, e.g. ``casa.gamma``.
    workers : str or int
        Number of worker processes; see :func:`~raceme.simulation.executor_for`.
    seed : int
        Seed of devices, losses and the app's unseeded random numbers.
    out : Path or None
        Output folder; by default a new one.
    max_time : float
        Virtual time in seconds at which the ServerApp is ended.
    examples : int or None
        Training examples of each client, for profiles with times per sample; None: from replies.
    evaluation_share : float or None
        Compute time of an evaluation as a share of a training task; None: it takes no time.
    node_config : tuple[str, ...]
        Additions to every node's config, as typed.

    Raises
    ------
    UserError
        A value has the wrong type, or is out of its range.
    """

    folder: Path
    clients: int = option(10, "simulated SuperNodes", low=1)
    devices: str = option("slow30x5", "device profile")
    run_config: tuple[str, ...] = ()
    strategy: str | None = None
    parameters: Mapping[str, Value] = field(default_factory=dict)
    workers: str | int = "auto"
    seed: int = option(0, "seed", low=0)
    out: Path | None = None
    max_time: float = option(math.inf, "limit of virtual time", unit=SECONDS, above=0)
    examples: int | None = option(None, "training examples of each client", low=1)
    evaluation_share: float | None = option(None, "time of an evaluation", low=0)
    node_config: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.metadata and value != item.default:
                value = convert(item.name.replace("_", "-"), value, item)
                object.__setattr__(self, item.name, value)


class AppEnding(StrEnum):
    """End of a simulated app."""

    RETURNED = "returned"
    """Its ServerApp returned."""
    FAILED = "failed"
    """Its ServerApp raised an exception."""
    HALTED = "halted"
    """It would never have returned, or a limit was reached."""
    INTERRUPTED = "interrupted"
    """The user ended it."""


@dataclass(frozen=True)
class Simulated:
    """Outcome of a simulation.

    Attributes
    ----------
    out : Path
        Output folder.
    fleet : Fleet
        Tasks of every client with the times of sending, start, end and reply.
    ending : AppEnding
        Whether the ServerApp returned, raised an exception, or was ended.
    reason : str
        Reason if it did not return, else empty.
    wall_time : float
        Duration in seconds on this machine.
    """

    app: FlowerApp
    settings: Settings
    out: Path
    fleet: exchanges.FleetRecord
    ending: AppEnding
    reason: str
    wall_time: float


def simulate(settings: Settings) -> Simulated:
    """Run a Flower app on virtual time.

    Raises
    ------
    UserError
        The settings are invalid; checked before the ServerApp is called as far as possible.
    """
    app = read_app(settings.folder, settings.run_config)
    make = None
    if settings.strategy is not None:
        make = partial(build_method, settings.strategy, settings.parameters, settings.seed)
        make()
    elif settings.parameters:
        unread = ", ".join(settings.parameters)
        raise UserError(f"{unread} is read by a strategy: name one with --strategy.")
    nodes = nodes_of(settings.devices, [settings.examples or 0] * settings.clients, settings.seed)
    own = _pairs("--node-config", settings.node_config)
    for key in own:
        if key in nodes[0].config:
            raise UserError(f"--node-config {key}: the simulation sets it.")
    nodes = [replace(node, config={**node.config, **own}) for node in nodes]
    prepare(settings.workers)
    started = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(own_randomness([settings.seed, _SERVER]))
        clock = AppClock([app.folder])
        stack.enter_context(clock.running())
        server_app = app.load_server()
        client_app = app.load_client()
        if "torch" in sys.modules:
            # As in worker processes, so that results do not depend on their number.
            sys.modules["torch"].set_num_threads(1)
        executor = executor_for(app.client, settings.workers, seed=settings.seed)
        learned = CostLearningExecutor(
            executor, nodes, settings.examples, settings.evaluation_share
        )
        stack.callback(learned.close)
        out = new_folder(settings.out, app.name)
        names = {node.node_id: node.client_id for node in nodes}
        online = [node.node_id for node in nodes if node.device.starts_online()]
        log = stack.enter_context(exchanges.ExchangeLog(out / MESSAGES, names, online))
        grid = clock.grid = AppGrid(
            client_app,
            nodes,
            run_config=app.run_config,
            seed=settings.seed,
            executor=learned,
            cost=learned.cost,
            observe=log.observe,
            max_time=settings.max_time,
            free_evaluation=settings.evaluation_share is None,
        )
        if make is not None:
            observe = stack.enter_context(method_store(out)).observe
            methods = stack.enter_context(replaced(str(settings.strategy), make, observe))
            grid.check_training = partial(check_replaced, methods, app, settings.strategy)
        # Random numbers drawn while importing do not count.
        seed_process([settings.seed, _SERVER])
        context = compat.server_context(grid.run.run_id, app.run_config)
        ending, reason = call_server(app, lambda: server_app(grid, context))
        if grid.check_training is not None and ending is AppEnding.RETURNED:
            grid.check_training()
        for exchange in grid.unanswered():
            log.observe(exchange)
        fleet = log.fleet(min(grid.now(), settings.max_time))
    return Simulated(
        app, settings, out, fleet, ending, reason, wall_time=time.perf_counter() - started
    )


def check_replaced(methods: Sequence[Method], app: FlowerApp, strategy: str | None) -> None:
    """Raise UserError if a method replaced no strategy."""
    if not methods:
        raise UserError(
            f"The ServerApp of {app.folder} starts no strategy of Flower's (Strategy.start): "
            f"{strategy} cannot replace it. Leave --strategy out."
        )


@contextmanager
def method_store(out: Path) -> Iterator[RunStore]:
    """Open the run store of a method; a UserError removes it."""
    try:
        with RunStore(out) as store:
            yield store
    except UserError:
        (out / STORE).unlink(missing_ok=True)
        raise


def call_server(app: FlowerApp, server_app: Callable[[], object]) -> tuple[AppEnding, str]:
    """Call the ServerApp; return how it ended, and the reason if it did not return."""
    try:
        server_app()
    except Halted as halted:
        return AppEnding.HALTED, str(halted)
    except KeyboardInterrupt:
        return AppEnding.INTERRUPTED, "interrupted"
    except UserError:
        raise
    except SystemExit as end:
        if end.code in (None, 0):
            return AppEnding.RETURNED, ""
        return AppEnding.FAILED, f"the ServerApp ended the process with {end.code!r}"
    except Exception as error:
        if told := app.missing(error):
            raise told from None
        _show(error, app.folder)
        said = f"the ServerApp raised {type(error).__name__}: {one_line(error)}"
        return AppEnding.FAILED, said
    return AppEnding.RETURNED, ""


def _show(error: Exception, folder: Path) -> None:
    """Print an exception's traceback without the frames above the app."""
    frames = error.__traceback__
    own = frames
    while own is not None and not own.tb_frame.f_code.co_filename.startswith(str(folder)):
        own = own.tb_next
    sys.stdout.flush()
    traceback.print_exception(type(error), error, own or frames)


# -----------------------------------------------------------------------------
# Artefacts of a simulated app besides its messages: summary, accounts, plots.
# -----------------------------------------------------------------------------


log = logging.getLogger("raceme")


def write_results(simulated: Simulated) -> tuple[dict[str, Any], list[str]]:
    """Write a simulation's results into its folder.

    Returns
    -------
    tuple[dict[str, Any], list[str]]
        The content of ``summary.json``, and the names of files that could not be written.
    """
    out, fleet = simulated.out, simulated.fleet
    accounts = fleet.accounts()
    summary = _summary(simulated, accounts)
    failed = []
    writers: dict[str, Callable[[], None]] = {
        exchanges.CLIENTS: lambda: exchanges.write_accounts(out / exchanges.CLIENTS, accounts),
        SUMMARY: lambda: write_summary(out / SUMMARY, summary),
        "timeline.png": lambda: save_figure(timeline_figure(fleet), out / "timeline.png"),
        "waiting.png": lambda: save_figure(waiting_figure(fleet, accounts), out / "waiting.png"),
    }
    if simulated.settings.strategy is not None:
        record = read_run(out)
        writers["accuracy.png"] = lambda: save_figure(
            accuracy_figure(record, title=str(simulated.settings.strategy)), out / "accuracy.png"
        )
        writers["clusters.png"] = lambda: save_figure(clusters_figure(record), out / "clusters.png")
    for name, write in writers.items():
        try:
            write()
        except Exception:
            log.exception("%s could not be written", name)
            failed.append(name)
    return summary, failed


def _summary(simulated: Simulated, accounts: list[exchanges.ClientAccount]) -> dict[str, Any]:
    """Return the summary of a simulation as JSON values."""
    fleet, settings = simulated.fleet, simulated.settings
    busy, idle, offline = (
        math.fsum(getattr(account, name) for account in accounts)
        for name in ("busy", "idle", "offline")
    )
    whole = busy + idle + offline
    return {
        "app": simulated.app.name,
        "strategy": settings.strategy,
        "ending": simulated.ending.value,
        "reason": simulated.reason or None,
        "virtual_time": fleet.end,
        "without_waiting": fleet.without_waiting(),
        "wall_time": simulated.wall_time,
        "clients": len(fleet.clients),
        "messages": len(fleet.tasks),
        "messages_by_kind": dict(Counter(task.kind for task in fleet.tasks)),
        "tasks": sum(task.takes_time for task in fleet.tasks),
        "replies": sum(task.answered < math.inf for task in fleet.tasks),
        "failures": sum(task.failure is not None for task in fleet.tasks),
        "first_failure": _first_failure(fleet),
        "all_training_failed": _all_training_failed(fleet),
        "bytes_down": sum(task.bytes_down for task in fleet.tasks),
        "bytes_up": sum(task.bytes_up for task in fleet.tasks),
        "busy_seconds": busy,
        "idle_seconds": idle,
        "offline_seconds": offline,
        "busy_share": busy / whole if whole else None,
        "idle_share": idle / whole if whole else None,
        "offline_share": offline / whole if whole else None,
        "times_work_was_given": len(fleet.moments()) - 1,
        "times_waited_for": sum(map(bool, fleet.awaited())),
        "most_waited_for": {
            account.client: account.held_up
            for account in sorted(accounts, key=lambda a: -a.held_up)[:5]
            if account.held_up > 0
        },
        "offline": {
            client: [list(span) for span in gone] for client, gone in fleet.offline.items()
        },
        "command": _command(simulated),
        "settings": {
            "app": str(simulated.app.folder),
            "clients": settings.clients,
            "devices": settings.devices,
            "seed": settings.seed,
            "run_config": dict(simulated.app.run_config),
            "parameters": dict(settings.parameters),
            "examples": settings.examples,
            "evaluation_share": settings.evaluation_share,
        },
        "version": raceme.__version__,
    }


def _command(simulated: Simulated) -> str:
    """Return the command that repeats the simulation."""
    settings = simulated.settings
    options: dict[str, object] = {
        "--clients": settings.clients,
        "--devices": settings.devices,
        "--strategy": settings.strategy,
        "--workers": settings.workers,
        "--seed": settings.seed,
        "--examples": settings.examples,
        "--evaluation-share": settings.evaluation_share,
        "--max-time": settings.max_time if settings.max_time < math.inf else None,
    }
    words = ["raceme", "simulate", str(simulated.app.folder)]
    for name, value in options.items():
        words += [name, str(value)] if value is not None else []
    for text in settings.run_config:
        words += ["--run-config", text]
    for text in settings.node_config:
        words += ["--node-config", text]
    for key, value in settings.parameters.items():
        words += ["--set", f"{key}={value}"]
    return shlex.join(words)


def _all_training_failed(fleet: exchanges.FleetRecord) -> bool:
    """Return whether all training messages failed."""
    tasks = [task for task in fleet.tasks if task.kind.startswith(MessageType.TRAIN)]
    failed = [task for task in tasks if task.failure is not None]
    usable = [task for task in tasks if task.failure is None and task.answered < math.inf]
    return bool(failed) and not usable


def _first_failure(fleet: exchanges.FleetRecord) -> str | None:
    """Return the first failure in one line."""
    for task in fleet.tasks:
        if task.failure is not None:
            reason = task.failure.strip().partition("\n")[0]
            when = f" at {task.answered:.1f} s" if task.answered < math.inf else ""
            return f"{task.client}{when}: {reason}"
    return None
