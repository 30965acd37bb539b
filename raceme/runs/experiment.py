"""Runs: building, checking and executing the parts of a configuration."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.serverapp import Grid
from threadpoolctl import threadpool_limits

from raceme import datasets
from raceme.core import messages as names
from raceme.core.chain import Chain, resolved
from raceme.core.clusters import Model, blended
from raceme.core.config import CONFIG, RunConfig, own_keys, read_toml
from raceme.core.errors import UserError, one_line, plural
from raceme.core.events import (
    ClustersScored,
    Ending,
    Evaluated,
    Event,
    Observer,
    Warned,
)
from raceme.core.files import absolute_text
from raceme.core.identities import BoundToKeys
from raceme.core.labels import Labels
from raceme.core.limits import Limits
from raceme.core.messages import DEFAULT_VALIDATION_SHARE, ModelSpec, Vector, kept_for_validation
from raceme.core.progress import Plan, StopCheck, never_stop
from raceme.core.registry import STRATEGIES
from raceme.core.strategy import Method
from raceme.core.timeline import Timeline, timeline_of
from raceme.datasets.dealt import with_whole_path
from raceme.datasets.drift import schedule_of
from raceme.records.folder import (
    LOG,
    STORE,
    SUMMARY,
    begin,
    failure_recorded,
    forget_end,
    log_file,
    new_folder,
    only_writer,
    removed_on_failure,
    resumed_folder,
)
from raceme.records.store import RunStore, each_event
from raceme.records.summary import RunSummary
from raceme.runs.checkpoints import Checkpointer, CheckpointFolder, restore, resuming
from raceme.runs.trackers import TrackerObserver, chosen
from raceme.simulation import executor_for, prepare, training_seconds
from raceme.simulation.attacks import (
    NONE,
    attack_of,
    attackers_of,
    evaluation_settings,
    planned_requests,
    with_attackers,
)
from raceme.simulation.devices import (
    PREFIX,
    CostFunction,
    Workload,
    fleet,
    numbered,
    traced_fleet,
    training_cost,
)
from raceme.simulation.executor import load
from raceme.simulation.virtual_grid import VirtualGrid, nodes_of
from raceme.training import models
from raceme.training.clients import ModelProbe, probe_of, starts_of
from raceme.training.local import LARGEST_SHIFT

log = logging.getLogger("raceme.run")

_CLIENT_APP = "raceme.client_app:app"
_ATTACKED_APP = "raceme.simulation.attackers:app"
_WRITER_SECONDS = 30.0
"""Time after which a server app whose SuperLink died has released its folder."""


@dataclass(frozen=True)
class RunOutcome:
    """The result of a run.

    Attributes
    ----------
    out : Path
        The folder with the artefacts.
    summary : dict[str, Any]
        The content of its ``summary.json``.
    complete : bool
        Whether the run ended by its limits.
    interrupted : bool
        Whether the user ended it.
    unwritten : dict[str, str]
        Artefacts that could not be written or are incomplete, with reasons.
    """

    out: Path
    summary: dict[str, Any]
    complete: bool
    interrupted: bool
    unwritten: dict[str, str]


def resolve(config: RunConfig) -> RunConfig:
    """Fill in the dataset's and the method's defaults, and make paths absolute.

    Raises
    ------
    UserError
        The dataset or the strategy does not exist, or a given option does not apply.
    """
    config.check_options()
    chosen(config.track)
    config = config.with_absolute_paths().with_values(proxy=with_whole_path(config.proxy))
    config = datasets.with_fitting_groups(config)
    config = datasets.with_defaults(config)
    target, stop = config.target_accuracy, config.stop_at_target
    if target is not None and target > 1 and datasets.data_shape(config).target is None:
        raise UserError(f"target-accuracy must be at most 1, got {target:g}.")
    max_updates = config.max_updates
    if max_updates is None and not config.max_rounds:
        max_updates = config.planned_updates
    return resolved(config, _made(config).needs).with_values(
        max_updates=max_updates,
        target_accuracy=datasets.default_target(config) if target is None else target,
        stop_at_target=target is not None if stop is None else stop,
        eval_every=config.num_clients if config.eval_every is None else config.eval_every,
        devices=_resolved_devices(config.devices),
    )


def _made(config: RunConfig) -> Method:
    """Create the method of a configuration."""
    made: Method = STRATEGIES.make(config.strategy, config.parameters(), seed=config.seed)
    return made


def build_strategy(config: RunConfig) -> Method:
    """Make the strategy that a configuration names.

    Raises
    ------
    UserError
        There is no such strategy, or a limit in rounds does not apply to it.
    """
    strategy = _made(config)
    strategy.features = Chain.of(config)
    drift = schedule_of(config)
    if drift is not None and drift.in_rounds and strategy.scheduling.rounds is None:
        raise UserError(
            f"drift-at counts rounds, and {config.strategy} has none: give seconds, updates or "
            "uploads."
        )
    if strategy.needs.classes and datasets.data_shape(config).target is not None:
        raise UserError(
            f"The labels of {config.dataset} are quantities, and {config.strategy} has clients "
            f"{strategy.needs.classes}."
        )
    if config.augment:
        sides = datasets.data_shape(config).input_shape[1:]
        if len(sides) != 2 or min(sides) <= LARGEST_SHIFT:
            raise UserError(
                f"augment shifts images by {LARGEST_SHIFT} pixels, and {config.dataset} has none "
                "that are larger: leave it out."
            )
    for feature in strategy.features:
        feature.check(strategy.needs)
    if strategy.needs.validation and config.validation_share == 0:
        raise UserError(
            f"{config.strategy} compares models on held-out samples: validation-share must be "
            "above 0."
        )
    if config.max_rounds and strategy.scheduling.rounds is None:
        raise UserError(
            f"max-rounds counts rounds or windows, and {config.strategy} has neither: give "
            "max-updates or max-time."
        )
    return strategy


def check_parts(config: RunConfig) -> None:
    """Check a run's data, devices and model before any work starts.

    Parameters
    ----------
    config : RunConfig
        Configuration of the run, with every key resolved.

    Raises
    ------
    UserError
        A part is invalid.
    """
    fleet(config.devices, config.num_clients, config.seed)
    datasets.true_groups(config)
    # A client with a single training sample cannot hold one out.
    first = 0 if config.validation_fraction else config.num_clients - 1
    for client in range(first, config.num_clients):
        datasets.client_data(config, client)
    if config.pretrain:
        datasets.pretraining(config)
    models.initial_arrays(config)


def check_validation(config: RunConfig, strategy: Method) -> None:
    """Raise UserError if a simulated client keeps too few validation samples for the method."""
    if strategy.needs.validation:
        share = config.validation_share
        share = DEFAULT_VALIDATION_SHARE if share is None else share
        fewest = min(datasets.fewest_training(config, k) for k in range(config.num_clients))
        strategy.check_samples(kept_for_validation(fewest, share))


def fitted(config: RunConfig, strategy: Method) -> tuple[ArrayRecord, ModelProbe | None]:
    """Return the initial model and the proxy sets of a run, checked against the method.

    Raises
    ------
    UserError
        They do not fit, or the model does not exist or does not fit the data.
    """
    initial = models.initial_arrays(config)
    spec = ModelSpec.of(initial)
    strategy.check_model(spec)
    for feature in strategy.features:
        feature.check_model(spec)
    probe = probe_of(config, initial)
    strategy.check_server(0 if probe is None else probe.sets, bool(config.pretrain))
    return initial, probe


def build_grid(config: RunConfig, strategy: Method | None = None) -> VirtualGrid:
    """Make the simulated fleet of a configuration: one node per client, with its device.

    Raises
    ------
    UserError
        Unknown profile, unusable trace, missing data, an impossible partition; too few samples for
        the strategy, if one is given.
    """
    # Start worker processes while this one reads the data.
    prepare(config.workers)
    target = _CLIENT_APP if config.attack == NONE else _ATTACKED_APP
    if target is _ATTACKED_APP and (config.vectorised or config.device != "cpu"):
        raise UserError(
            f"attack={config.attack} is simulated one client at a time: leave vectorised and "
            "device out."
        )
    examples = [
        len(datasets.client_data(config, client).y_train) for client in range(config.num_clients)
    ]
    if strategy is not None:
        check_validation(config, strategy)
    names = datasets.client_names(config)
    labels = Path(config.labels) if config.labels else None
    Labels(labels, config.where).check_ids(_client_names(config))
    nodes = with_attackers(config, nodes_of(config.devices, examples, config.seed, names))
    executor = executor_for(
        target,
        config.workers,
        config.device,
        config.vectorised,
        seconds=lambda: training_seconds(config, examples),
        config=config,
        precision=config.precision,
    )
    cost: CostFunction = partial(training_cost, features=Chain.of(config))
    if config.drift != NONE and any(node.device.is_per_sample for node in nodes):
        cost = _cost_at_steps(config, cost)
    return VirtualGrid(
        load(target), nodes, config.to_mapping(), seed=config.seed, executor=executor, cost=cost
    )


def _cost_at_steps(config: RunConfig, steady: CostFunction) -> CostFunction:
    """Return the cost of messages to clients whose numbers of samples change with the step."""

    @cache
    def examples_at(client: int, step: int) -> int:
        return len(datasets.client_data(config, client, step).y_train)

    def cost(message: Message, context: Context, examples: int) -> Workload | None:
        settings = message.content.config_records.get(names.CONFIG, ConfigRecord())
        if (step := settings.get(names.STEP)) and isinstance(step, int):
            examples = examples_at(int(context.node_config["partition-id"]), step)
        load = steady(message, context, examples)
        return None if load is None else load._replace(examples=examples)

    return cost


def _client_names(config: RunConfig) -> Sequence[str]:
    """Return the names of the simulated clients, those of a trace before their own."""
    names = datasets.client_names(config)
    if config.devices.startswith(PREFIX):
        return traced_fleet(config.devices.removeprefix(PREFIX), config.num_clients, names)[1]
    return names or numbered(config.num_clients)


_LOGGERS = ("raceme", "raceme.run", "raceme.defaults")
"""Loggers whose warnings become events of the run; warnings about the machine have others."""


class RunWarnings(logging.Handler):
    """Collects the warnings that are logged for a run.

    Attributes
    ----------
    texts : dict[str, None]
        Warnings that are not events yet, in order.
    known : set[str]
        Warnings that have become events.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: dict[str, None] = {}
        self.known: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Store a warning; of those about single devices only the first of each kind.

        Errors are left out, as they concern files and the machine.
        """
        if record.levelno != self.level or record.name not in _LOGGERS:
            return
        text = one_line(record.getMessage())
        if "device" in getattr(record, "fields", {}):
            text += f" (further ones: {LOG})"
            if any(map(_kind(record.msg).match, self.known | self.texts.keys())):
                return
        self.texts[text] = None

    def take(self, time: float) -> Iterator[Warned]:
        """Yield the new warnings as events."""
        while self.texts:
            text = next(iter(self.texts))
            del self.texts[text]
            # A resumed run repeats its warnings.
            if text not in self.known:
                self.known.add(text)
                yield Warned(time, text)


@cache
def _kind(message: str) -> re.Pattern[str]:
    """Return the pattern of a message's texts, whatever their names and numbers are."""
    return re.compile(re.sub("%[a-z]", ".*", re.escape(message)))


_collecting: ContextVar[RunWarnings | None] = ContextVar("collecting", default=None)


@contextmanager
def warnings_of_run() -> Iterator[RunWarnings]:
    """Collect warnings within the context; an inner context adds to the outer one."""
    if (outer := _collecting.get()) is not None:
        yield outer
        return
    collected, logger = RunWarnings(), logging.getLogger("raceme")
    token = _collecting.set(collected)
    logger.addHandler(collected)
    try:
        yield collected
    finally:
        logger.removeHandler(collected)
        _collecting.reset(token)


def simulate(config: RunConfig, *observers: Observer, stop: StopCheck = never_stop) -> RunOutcome:
    """Run a configuration on virtual time.

    Parameters
    ----------
    config : RunConfig
        Configuration of the run; resolved here.
    observers : Observer
        Receives all events, e.g. a progress line.
    stop : Callable
        Called between two steps; returns the reason if the run is to end.

    Raises
    ------
    UserError
        The configuration is invalid; raised before any work starts.
    """
    with warnings_of_run():
        return _simulate(resolve(config), observers, stop)


def _simulate(config: RunConfig, observers: Sequence[Observer], stop: StopCheck) -> RunOutcome:
    """Run a resolved configuration."""
    has_limit = config.max_updates or config.max_rounds or config.max_time or config.max_compute
    if config.resume and (config.device_keys or not has_limit):
        raise UserError(
            f"{config.resume} is a run of real devices: resume it with `raceme serve`, as it was "
            "started."
        )
    if config.device_keys:
        raise UserError("device-keys is for real devices: leave it out of a simulation.")
    if not has_limit:
        raise UserError("Without --max-updates a simulation needs --max-time or --max-rounds.")
    strategy = build_strategy(config)
    check_fleet(config, strategy)
    grid = build_grid(config, strategy)
    from raceme.client_app import forget

    try:
        return execute(config, strategy, grid, *observers, stop=stop)
    finally:
        grid.close()
        # Free the clients' samples, a copy of the whole dataset as floats.
        forget()


_NO_ATTACK = "attack is for simulated clients: leave it out on real devices."


def check_fleet(config: RunConfig, strategy: Method, devices: int = 0) -> None:
    """Check that a method fits the size of the fleet, and warn if it is of little use there.

    Parameters
    ----------
    config, strategy
        The run's.
    devices : int
        Least expected number of real devices; 0 for a simulation, which has ``config.num_clients``.

    Raises
    ------
    UserError
        The hyper-parameters do not fit the number of clients, or an attack is set for real devices.
    """
    try:
        strategy.check(max(config.num_clients, devices))
    except UserError as error:
        raise UserError(f"{config.strategy} cannot run: {error}") from None
    if config.num_clients == 1 and not devices:
        log.warning("One client trains alone: federation needs at least two (--clients 2).")
    if config.attack == NONE:
        return
    if devices:
        raise UserError(_NO_ATTACK)
    attack_of(config).check(datasets.data_shape(config))
    if not attackers_of(config):
        log.warning(
            "The attack %s never happens: of %d clients, a share of %g rounds to none. Raise "
            "--attackers.",
            config.attack,
            config.num_clients,
            attack_of(config).options.attackers,
        )
    elif len(attackers_of(config)) == config.num_clients:
        log.warning("All clients attack: no result is that of an honest one. Lower --attackers.")


def _warn_of_late_changes(config: RunConfig, strategy: Method, grid: Grid) -> None:
    """Warn of drifts and attacks that are known never to happen."""
    if schedule := schedule_of(config):
        first = schedule.every or schedule.moments[0]
        drift = f"drift {config.drift}"
        _warn_if_late(drift, "drift-at", first, schedule.unit, config, strategy, grid)
    if config.attack != NONE:
        what, attack = f"attack {config.attack}", attack_of(config)
        join, first = attack.options.attackers_join, attack.first(planned_requests(config))
        # Attacks count requests from 0, the last of which bring no update, or rounds.
        unit = "requests" if strategy.scheduling.rounds is None else "rounds"
        _warn_if_late(what, "attackers-join", join, "seconds", config, strategy, grid)
        _warn_if_late(what, "attack-start", first, unit, config, strategy, grid)


def _has_attacked(config: RunConfig, strategy: Method, end: float) -> bool:
    """Return whether a run lasted until attackers were online and a request was attacked."""
    attack, rounds = attack_of(config), strategy.scheduling.rounds
    last = strategy.progress.tasks - 1 if rounds is None else rounds
    return attack.options.attackers_join <= end and attack.first(planned_requests(config)) <= last


def _warn_if_late(
    what: str, key: str, first: float, unit: str, config: RunConfig, strategy: Method, grid: Grid
) -> None:
    """Warn if a change begins after the end of the run, according to limits and devices."""
    most, rounds = config.max_updates or math.inf, config.max_rounds
    all_updates = plural(config.max_updates or 0, "update")
    # At the end each other client has an open request. A round has at least one update.
    limit, end_of = {
        "requests": (most + config.num_clients - 2, all_updates),
        "rounds": (rounds, plural(rounds, "round")) if rounds else (most, all_updates),
        "seconds": (config.max_time or math.inf, f"{config.max_time:g} seconds"),
        "updates": (most, all_updates),
    }.get(unit, (math.inf, ""))
    if first > limit:
        log.warning(
            "The %s never happens: the run ends after %s, and %s is %g. Choose an earlier %s.",
            what,
            end_of,
            key,
            first,
            key,
        )
    elif unit == "seconds" and first > (end := _estimated_end(config, strategy, grid)):
        log.warning(
            "The %s may never happen: on these devices %d updates take about %.0f s, and %s is "
            "%g s. Choose an earlier %s, or raise max-updates.",
            what,
            config.max_updates,
            end,
            key,
            first,
            key,
        )


def _estimated_end(config: RunConfig, strategy: Method, grid: Grid) -> float:
    """Estimate when a run on virtual time reaches its updates, in seconds; infinity if unknown.

    Clients of an asynchronous method are assumed to work all the time; transfers and churn are
    ignored.
    """
    if not isinstance(grid, VirtualGrid) or strategy.scheduling.rounds is not None:
        return math.inf
    if not config.max_updates or config.concurrency:
        return math.inf
    seconds = []
    for node in grid.nodes:
        device = node.device
        if device.comes_and_goes or device.online or device.bandwidth_down or device.bandwidth_up:
            return math.inf
        load = Workload(config.local_epochs, examples=node.examples)
        seconds.append(device.mean_duration(load))
    rate = sum(1 / each for each in seconds if each)
    return config.max_updates / rate if rate else math.inf


def _check_resumed_limit(config: RunConfig) -> None:
    """Refuse a limit below the run's number of updates, whose last ones would be dropped.

    Raises
    ------
    UserError
        The run has more updates than the limit.
    """
    folder = Path(config.resume)
    try:
        done = int(json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["updates"])
        before = read_toml(folder / CONFIG).get("max-updates")
    except (OSError, ValueError, KeyError):
        # A missing or unreadable file is reported later, when it is needed; a crash leaves no
        # summary.
        return
    # Rounds may exceed the limit, so the same limit is valid.
    if config.max_updates and config.max_updates < done and config.max_updates != before:
        raise UserError(
            f"The run in {config.resume} has {plural(done, 'update')} already, more than "
            f"max-updates {config.max_updates}: give a higher one to go on with it, e.g. "
            f"--max-updates {2 * done}."
        )


def execute(
    config: RunConfig,
    strategy: Method,
    grid: Grid,
    *observers: Observer,
    stop: StopCheck = never_stop,
) -> RunOutcome:
    """Run a strategy on any grid, and write the artefacts however the run ends.

    With the key ``resume`` it resumes an earlier run, in its folder, from its last checkpoint;
    without any, a run on virtual time starts again, which gives the same results.

    Parameters
    ----------
    config : RunConfig
        Configuration of the run, with every key resolved.
    strategy : Method
        The method made by `build_strategy`.
    grid : Grid
        A virtual grid, or one of Flower's.
    observers : Observer
        Receives all events.
    stop : Callable
        Called between two steps; returns the reason if the run is to end. A checkpoint is
        written then.

    Raises
    ------
    UserError
        The model does not exist or does not fit the data; the folder cannot be used; there is no
        checkpoint to resume from.
    """
    is_virtual = timeline_of(grid).is_virtual
    if config.attack != NONE and not is_virtual:
        raise UserError(_NO_ATTACK)
    _warn_of_late_changes(config, strategy, grid)
    initial, probe = fitted(config, strategy)
    identities = BoundToKeys(Path(config.device_keys), grid) if config.device_keys else None
    schedule = plan(config)
    if config.resume:
        _check_resumed_limit(config)
    out = resumed_folder(config) if config.resume else new_folder(config.out, config.short_name)
    starts: Sequence[Vector] = ()
    with ExitStack() as opened:
        warned = opened.enter_context(warnings_of_run())
        # A grid with a clock of its own has a single process, unlike Flower's.
        patience = 0.0 if isinstance(grid, Timeline) else _WRITER_SECONDS
        opened.enter_context(only_writer(out, patience))
        opened.enter_context(failure_recorded(out))
        if not config.resume:
            begin(out, config)
        opened.enter_context(log_file(out / LOG))
        checkpoints = CheckpointFolder(out)
        restored = restore(checkpoints, config, strategy, grid) if config.resume else None
        started = time.perf_counter() - (restored.wall_time if restored else 0.0)
        summary = RunSummary(_attackers(config))

        def wall_time() -> float:
            return time.perf_counter() - started

        # The server's matrices are small: threads of the linear algebra library would compete with
        # training for cores.
        if restored is None or restored.path is None:
            with nullcontext() if restored else removed_on_failure(out), threadpool_limits(1):
                starts = starts_of(config, initial)
                store = RunStore(out, after=0 if restored else None)
        else:
            store = RunStore(out, after=restored.events)
        with store, threadpool_limits(1):
            if restored:
                forget_end(config, out)
            listening: list[Callable[[Event], object]] = [store.observe, summary.observe]
            updates = strategy.progress.updates if restored else None
            trackers = opened.enter_context(TrackerObserver(config, out, updates, summary))
            listening += [trackers, *observers]
            if restored:
                for event in each_event(out):
                    summary.observe(event)
                    trackers.replay(event)
                warned.known.update(summary.warnings)
            after = None
            if restored:
                after = summary.time if restored.events else -math.inf
            observing = [feature.observer(out, after) for feature in strategy.features]
            listening += filter(None, observing)

            limits = replace(schedule, computed=lambda: summary.compute)

            def observe(event: Event) -> None:
                for told in (*warned.take(event.time), event):
                    for observer in listening:
                        observer(told)
                if probe and isinstance(event, Evaluated) and strategy.has_distributions:
                    scores = score_clusters(strategy.served, probe, event.time, event.updates)
                    if scores is not None:
                        observe(scores)

            checkpointer = Checkpointer(
                checkpoints,
                config,
                strategy,
                grid,
                store,
                wall_time=wall_time,
                stop=stop,
                resumed=restored is not None,
            )
            if not is_virtual:
                listening.insert(0, checkpointer.on_event)
            checkpoint = restored.path if restored else None
            with resuming(checkpoint, strategy.progress) if checkpoint else nullcontext():
                strategy.run(
                    grid,
                    initial,
                    max_updates=config.max_updates or 0,
                    timeout=config.task_timeout,
                    train_config=training_settings(config, report_timing=not is_virtual),
                    evaluate_config=evaluation_settings(config),
                    plan=limits,
                    observe=observe,
                    stop_check=checkpointer.stop_check,
                    probe=probe,
                    starts=starts,
                    identities=identities,
                )
        result = {
            **summary.result(
                strategy=config.strategy,
                dataset=config.dataset,
                model=config.model,
                seed=config.seed,
                wall_time=wall_time(),
                target=config.target_accuracy,
            ),
            **_further_result(config, strategy, summary, checkpointer.code, is_virtual),
            **_stacked_result(grid),
        }
        unwritten = _write_artefacts(out, config, strategy, result, is_virtual)
        trackers.end(result, out)
    unwritten |= trackers.failures
    failures = {STORE: store.failure, "checkpoint": checkpointer.failure}
    unwritten |= {name: failure for name, failure in failures.items() if failure}
    ending = summary.ending
    return RunOutcome(
        out=out,
        summary=result,
        complete=ending is not None and ending.is_complete,
        interrupted=ending is Ending.INTERRUPTED,
        unwritten=unwritten,
    )


def _attackers(config: RunConfig) -> list[str]:
    """Return the names of the simulated clients that attack."""
    if config.attack == NONE:
        return []
    clients = _client_names(config)
    return [clients[number] for number in attackers_of(config)]


def _further_result(
    config: RunConfig, strategy: Method, summary: RunSummary, code: str, is_virtual: bool
) -> dict[str, Any]:
    """Return the entries of a run's summary that only some runs have."""
    found: dict[str, Any] = {}
    if code:
        found["code"] = code
    if keys := own_keys(config):
        # Recorded here, as a page of the run does not import users' modules.
        found["own_keys"] = {
            name: {"default": key.default, "help": key.help} for name, key in keys.items()
        }
    if schedule_of(config) is not None and not summary.has_drifted:
        found["missed_drift"] = config.drift
    if config.attack != NONE and not _has_attacked(config, strategy, summary.time):
        found["missed_attack"] = config.attack
    if is_virtual:
        found["constant_guess"] = datasets.constant_guess(config)
    else:
        found["clock"] = "wall"
    return found


def _stacked_result(grid: Grid) -> dict[str, float]:
    """Return the mean number of clients that were trained at once, if they were stacked."""
    mean = grid.mean_batch if isinstance(grid, VirtualGrid) else None
    return {} if mean is None else {"mean_batch": mean}


def _write_artefacts(
    out: Path, config: RunConfig, strategy: Method, result: Mapping[str, Any], is_virtual: bool
) -> dict[str, str]:
    """Write summary, models and figures; return those that failed, with reasons."""
    # Figures are drawn only at the end.
    from raceme.reporting.artefacts import write_all

    spec, used = strategy.spec, models_in_use(strategy) if config.client_models else ()
    return write_all(
        out,
        summary=result,
        models={k: spec.views(model.vector) for k, model in strategy.served.items()},
        clients=((client, spec.views(vector)) for client, vector in used),
        similarity=strategy.similarity(),
        target=config.target_accuracy,
        clock="virtual time" if is_virtual else "time",
    )


def plan(config: RunConfig) -> Plan:
    """Return the limits and the schedule of a configuration."""
    return Plan(
        **{item.name: getattr(config, item.name) for item in fields(Limits)},
        drift=schedule_of(config),
        highest_score=1.0 if datasets.data_shape(config).target is None else float("inf"),
        labels=Labels(Path(config.labels) if config.labels else None, config.where),
        planned_updates=config.planned_updates,
    )


def training_settings(config: RunConfig, report_timing: bool = False) -> ConfigRecord:
    """Return the settings of every training message.

    Parameters
    ----------
    config : RunConfig
        Configuration of the run, with every key resolved.
    report_timing : bool
        Whether to request wall times, which differ between runs.
    """
    settings = config.in_messages()
    if config.validation_share is not None:
        settings[names.VALIDATION_SHARE] = config.validation_share
    if report_timing:
        settings[names.REPORT_TIMING] = True
    return ConfigRecord(settings)


def _resolved_devices(devices: str) -> str:
    """Make the path in a device profile absolute, if any."""
    if devices.startswith(PREFIX):
        return PREFIX + absolute_text(devices.removeprefix(PREFIX))
    return absolute_text(devices) if devices.endswith(".toml") else devices


# -----------------------------------------------------------------------------
# Tests of cluster models on the server's test sets.
# -----------------------------------------------------------------------------


def score_clusters(
    models: Mapping[int, Model], tests: ModelProbe, time: float, updates: int
) -> ClustersScored | None:
    """Test each cluster's model on the test set of its own distribution.

    Parameters
    ----------
    models : Mapping[int, Model]
        Models by cluster; cluster k is assumed to have distribution k. Further clusters are not
        tested.
    tests : ModelProbe
        The server's test sets, one per distribution.
    time, updates : float, int
        Time of the models.

    Returns
    -------
    ClustersScored or None
        The report; None if there is no model to test.
    """
    accuracies = {
        cluster: float(tests.accuracy(model.vector, cluster))
        for cluster, model in sorted(models.items())
        if cluster < tests.tests
    }
    return ClustersScored(time, updates, accuracies) if accuracies else None


# -----------------------------------------------------------------------------
# The model in use at each client, with which its accuracy is measured.
# -----------------------------------------------------------------------------


def models_in_use(method: Method) -> Iterator[tuple[str, Vector]]:
    """Yield each online client with its current model.

    This is its cluster's model, or the mixture Σ_k α_k w_k of several. Models are made one at a
    time, as those of a fleet may not fit into memory.

    Parameters
    ----------
    method : Method
        The method after its run.

    Yields
    ------
    tuple[str, Vector]
        A client and its model's weights, shape (d,).
    """
    served = method.served
    for client in method.progress.fleet.online():
        yield client.client_id, blended(served, method.placement(client.client_id))
