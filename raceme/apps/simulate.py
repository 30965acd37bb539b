"""Any Flower app on virtual time: its parts are loaded, run, and what happened is written down."""

from __future__ import annotations

import math
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any

from raceme.apps.app import FlowerApp, read_app
from raceme.apps.clock import AppClock
from raceme.apps.cost import Learned
from raceme.apps.folder import prepare_folder
from raceme.apps.grid import AppGrid
from raceme.apps.halted import Halted
from raceme.apps.replace import Replacement, build_method
from raceme.compat import app as compat
from raceme.config.errors import UserError
from raceme.protocol.events import Observer
from raceme.records.exchanges import MESSAGES, ExchangeLog, Fleet
from raceme.records.store import FILE_NAME, RunStore
from raceme.simulation import Executor, Node, executor_for, nodes_of, prepare
from raceme.simulation.randomness import own_randomness, seed_process

Value = str | int | float | bool

_SERVER = 0
"""Stands for the ServerApp where a seed is derived."""


@dataclass(frozen=True)
class Settings:
    """What to simulate.

    Attributes
    ----------
    folder : Path
        The app's.
    clients : int
        Number of simulated SuperNodes.
    devices : str
        Device profile.
    run_config : tuple[str, ...]
        What changes the app's run config, as it was typed.
    strategy : str or None
        Method that takes the place of the app's strategy.
    parameters : Mapping[str, Value]
        Its hyper-parameters, as ``casa.gamma``.
    workers : str or int
        Number of worker processes; see :func:`~raceme.simulation.executor_for`.
    seed : int
        Decides devices, losses, and all that the app draws without a seed of its own.
    out : Path or None
        Folder for what the simulation leaves; by default a new one.
    max_time : float
        Virtual time in seconds at which the ServerApp is ended.
    max_wall_time : float
        The same by the machine's clock.
    examples : int or None
        Training examples of each client, for profiles with times per sample; None: from replies.
    evaluation_share : float or None
        What an evaluation computes, as a share of a training task; None: it takes no time.
    """

    folder: Path
    clients: int = 10
    devices: str = "slow30x5"
    run_config: tuple[str, ...] = ()
    strategy: str | None = None
    parameters: Mapping[str, Value] = field(default_factory=dict)
    workers: str | int = "auto"
    seed: int = 0
    out: Path | None = None
    max_time: float = math.inf
    max_wall_time: float = math.inf
    examples: int | None = None
    evaluation_share: float | None = None


class AppEnding(StrEnum):
    """How a simulated app ended."""

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
    """What a simulation has shown.

    Attributes
    ----------
    app : FlowerApp
        The app.
    settings : Settings
        What was simulated.
    out : Path
        The folder with all that it left.
    fleet : Fleet
        Who did what when.
    ending : AppEnding
        How the ServerApp ended.
    reason : str
        Why it did not return; empty if it did.
    wall_time : float
        Seconds that the simulation took on this machine.
    """

    app: FlowerApp
    settings: Settings
    out: Path
    fleet: Fleet
    ending: AppEnding
    reason: str
    wall_time: float


def simulate(settings: Settings) -> Simulated:
    """Run a Flower app on virtual time.

    Raises
    ------
    UserError
        Anything that cannot work is said before the ServerApp is called, as far as it can be known.
    """
    app = read_app(settings.folder, settings.run_config)
    _check(settings)
    nodes = nodes_of(settings.devices, [settings.examples or 0] * settings.clients, settings.seed)
    prepare(settings.workers)
    started = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(own_randomness([settings.seed, _SERVER]))
        clock = AppClock([app.folder])
        stack.enter_context(clock.running())
        server_app = app.load_server()
        client_app = app.load_client()
        _one_thread()
        executor = executor_for(app.client, settings.workers, seed=settings.seed)
        learned = _learned(settings, nodes, executor)
        stack.callback(learned.close)
        out = prepare_folder(settings.out, app.name)
        names = _names(nodes)
        online = [node.node_id for node in nodes if node.device.starts_online()]
        log = stack.enter_context(ExchangeLog(out / MESSAGES, names, online))
        grid = clock.grid = AppGrid(
            client_app,
            nodes,
            app.run_config,
            settings.seed,
            learned,
            cost=learned.cost,
            observe=log.observe,
            max_time=settings.max_time,
            free_evaluation=settings.evaluation_share is None,
        )
        replacement = None
        if settings.strategy is not None:
            store = stack.enter_context(_store(out))
            replacement = _replacement(settings.strategy, settings, store.observe)
            stack.enter_context(replacement.in_place())
        # What importing drew is not part of what the ServerApp draws.
        seed_process([settings.seed, _SERVER])
        context = compat.server_context(grid.run.run_id, app.run_config)
        with _wall_limit(settings.max_wall_time):
            ending, reason = _call(app, lambda: server_app(grid, context))
        if replacement is not None and ending is AppEnding.RETURNED and not replacement.methods:
            raise UserError(
                f"The ServerApp of {app.folder} starts no strategy of Flower's (Strategy.start): "
                f"{settings.strategy} cannot take its place. Leave --strategy out."
            )
        for exchange in grid.unanswered():
            log.observe(exchange)
        fleet = log.fleet(min(grid.now(), settings.max_time))
    return Simulated(
        app, settings, out, fleet, ending, reason, wall_time=time.perf_counter() - started
    )


def _check(settings: Settings) -> None:
    """Check what the command line cannot."""
    if settings.strategy is not None:
        build_method(settings.strategy, settings.parameters, settings.seed)
    elif settings.parameters:
        raise UserError("--set takes keys of a strategy: name one with --strategy.")


def _learned(settings: Settings, nodes: list[Node], executor: Executor) -> Learned:
    """Return the executor that knows what messages cost."""
    per_sample = {
        node.node_id: node.device.seconds_per_sample > 0 or node.device.exponential_rate > 0
        for node in nodes
    }
    return Learned(executor, per_sample, settings.examples, settings.evaluation_share)


def _names(nodes: list[Node]) -> dict[int, str]:
    """Return what clients are called in results: what a trace calls them, or by their number."""
    return {
        node.node_id: str(node.config.get("device-id", f"client-{index}"))
        for index, node in enumerate(nodes)
    }


@contextmanager
def _store(out: Path) -> Iterator[RunStore]:
    """Open the run store of a method; an error of the user's leaves none."""
    try:
        with RunStore(out) as store:
            yield store
    except UserError:
        (out / FILE_NAME).unlink(missing_ok=True)
        raise


def _replacement(name: str, settings: Settings, observe: Observer) -> Replacement:
    """Return what starts a method in the place of the app's strategy."""
    return Replacement(
        name, lambda: build_method(name, settings.parameters, settings.seed), observe
    )


def _call(app: FlowerApp, server_app: Any) -> tuple[AppEnding, str]:
    """Call the ServerApp and say how it ended, and why if it did not return."""
    try:
        server_app()
    except Halted as halted:
        return AppEnding.HALTED, str(halted)
    except KeyboardInterrupt:
        return AppEnding.INTERRUPTED, "interrupted"
    except UserError:
        raise
    except ModuleNotFoundError as error:
        raise app.missing(error) from None
    except SystemExit as end:
        if end.code in (None, 0):
            return AppEnding.RETURNED, ""
        return AppEnding.FAILED, f"the ServerApp ended the process with {end.code!r}"
    except Exception as error:
        _show(error, app.folder)
        summary = " ".join(str(error).split())
        return AppEnding.FAILED, f"the ServerApp raised {type(error).__name__}: {summary}"
    return AppEnding.RETURNED, ""


def _show(error: Exception, folder: Path) -> None:
    """Print where in the app an exception came up; what is above the app is no use to anybody."""
    frames = error.__traceback__
    own = frames
    while own is not None and not own.tb_frame.f_code.co_filename.startswith(str(folder)):
        own = own.tb_next
    sys.stdout.flush()
    traceback.print_exception(type(error), error, own or frames)


def _one_thread() -> None:
    """Let torch use one thread in this process too, as clients do in worker processes.

    The numbers would otherwise depend on how many workers there are.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@contextmanager
def _wall_limit(seconds: float) -> Iterator[None]:
    """Halt what happens meanwhile after some seconds of the machine's clock."""
    if seconds == math.inf:
        yield
        return

    def halt(number: int, frame: FrameType | None) -> None:
        raise Halted(
            f"the ServerApp had not returned after {seconds:g} s of this machine's time "
            "(--max-wall-time)"
        )

    before = signal.signal(signal.SIGALRM, halt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
