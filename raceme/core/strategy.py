"""A method as a Flower strategy: what it says, its state, and the loop that it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO, getLogger
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from raceme.core import events
from raceme.core.clients import Identities
from raceme.core.clusters import Bases, Clusters
from raceme.core.drop_in import check_share, divided, flower_run
from raceme.core.drop_in import start as drop_in
from raceme.core.errors import UserError
from raceme.core.interface import Applied, Probe, Questions, RunResult, StopCheck, never_stop
from raceme.core.loop import Loop
from raceme.core.messages import VALIDATION_SHARE, ModelSpec, Vector
from raceme.core.progress import Plan, Progress
from raceme.core.protection import Guard, GuardState, NoProtection
from raceme.core.requests import Update
from raceme.core.scheduling import Dispatch, NoState, from_tree, to_tree

log = getLogger("raceme")

DEFAULT_VALIDATION_SHARE = 0.2
"""What clients keep to compare models on, if a method needs that and nobody says how much."""


class Method(Questions, Strategy):
    """A method: a Flower strategy that says what the loop is to do.

    A subclass says what becomes of an update (`on_update`), or of several together (`aggregate`);
    see `Questions` for what else it can say.

    Parameters
    ----------
    parameters : dataclass, optional
        Hyper-parameters; by default the class's `parameters_type`, made without arguments.
    seed : int
        Decides whatever the method leaves to chance.
    **arguments
        Single hyper-parameters, and the arguments that Flower's own strategies take
        (:class:`~raceme.core.drop_in.FlowerArguments`): ``fraction_train=0.5``.

    Raises
    ------
    UserError
        There is no such argument, or it means nothing to the method.

    Attributes
    ----------
    planned_updates : int
        Client updates after which the run ends, or is expected to, for schedules that depend on its
        length.
    probe : Probe or None
        Measures models on the server's own data, where a run has some.
    starts : Sequence[Vector]
        Models that the server has pre-trained, for `initialize`: one for each distribution.
    """

    parameters_type: ClassVar[type[Any]] = NoState

    def __init__(self, parameters: Any = None, seed: int = 0, **arguments: Any) -> None:
        self.parameters, self.arguments = divided(
            type(self).__name__, self.parameters_type, parameters, arguments
        )
        self.rng = np.random.default_rng(np.random.SeedSequence([seed, 0x57A7E9]))
        self.progress = Progress()
        self.clusters = Clusters()
        self.state: Any = None
        self.planned_updates = 0
        self.probe: Probe | None = None
        self.starts: Sequence[Vector] = ()
        self.result = RunResult()
        self.bases = Bases()
        self.protection: Guard = NoProtection()
        self.train_config = ConfigRecord()
        self.report: events.Observer = events.ignore
        self.step_of: Callable[[str], int | None] = lambda client: None
        self.dispatch: Dispatch = self.policy()
        check_share(self, self.arguments)
        self._spec: ModelSpec | None = None
        self._now: Callable[[], float] = lambda: 0.0
        self._loaded = False

    # What a method can ask.

    @property
    def spec(self) -> ModelSpec:
        """Names and shapes of a model's arrays; known from the start of a run on."""
        assert self._spec is not None, "start() sets the specification"
        return self._spec

    def now(self) -> float:
        """Return the time on the grid's clock in seconds; before the start that of the state."""
        return self._now()

    @property
    def trainable(self) -> NDArray[np.bool_] | None:
        """Which numbers of a model are weights, shape (d,); None if all are."""
        return None if self._spec is None else self._spec.trainable

    def compared(self, vector: Vector) -> Vector:
        """Return what of a model may be compared: its weights, no running statistics."""
        return vector if self._spec is None else self._spec.compared(vector)

    # Running.

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        **further: Any,
    ) -> RunResult:
        """Run in a user's own Flower app, in the place of one of Flower's strategies.

        The ClientApp need know nothing of Raceme: messages and replies are those of Flower's own
        strategies, clients are known by their nodes, or by the ``client-id`` that a ConfigRecord of
        their replies states.

        Parameters
        ----------
        grid : Grid
            Any Flower grid.
        initial_arrays : ArrayRecord
            The initial model; its names and shapes are those of every model of the run.
        num_rounds : int
            Rounds. Of a method that works in none, a round is as many updates as clients take part.
        timeout : float
            Seconds after which an unanswered message is lost.
        train_config, evaluate_config : ConfigRecord, optional
            Sent along with every training and every evaluation message.
        evaluate_fn : Callable, optional
            Called before the first and after each round, once per cluster, with the number of the
            round and the arrays of the cluster's model. What it returns is averaged over the
            clusters' clients.
        **further
            Other fields of :class:`~raceme.core.drop_in.FlowerRun`: ``max_updates`` ends the
            run after so many updates instead of rounds, ``max_time`` at this time at the latest;
            ``observe`` is called with everything that happens; ``greet=True`` asks clients who
            they are, as Raceme's own ClientApp expects.

        Returns
        -------
        RunResult
            Models, metrics by round, and who is where.

        Raises
        ------
        UserError
            The run cannot begin; the ClientApp cannot do what the method asks for; no client has
            returned anything of use.
        """
        told = flower_run(
            grid=grid,
            initial_arrays=initial_arrays,
            num_rounds=num_rounds,
            timeout=timeout,
            train_config=train_config or ConfigRecord(),
            evaluate_config=evaluate_config or ConfigRecord(),
            evaluate_fn=evaluate_fn,
            **further,
        )
        return drop_in(self, self.arguments, told, self.run)

    def run(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        max_updates: int = 500,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        *,
        plan: Plan | None = None,
        observe: events.Observer = events.ignore,
        stop_check: StopCheck = never_stop,
        probe: Probe | None = None,
        starts: Sequence[Vector] = (),
        identities: Identities | None = None,
    ) -> RunResult:
        """Run with Raceme's own ClientApp, or one that answers as it does.

        Until a limit is reached, nobody is left, or the user interrupts. A strategy that has run
        before, or was given a state, resumes: everybody is greeted again, and tasks that were open
        then are given up; unless the grid was brought back to its own state of that moment, and
        continues as if nothing had happened.

        Parameters
        ----------
        grid : Grid
            Any Flower grid.
        initial_arrays : ArrayRecord
            The initial model; its names and shapes are those of every model of the run.
        max_updates : int
            Client updates to apply; 0: no limit but the plan's. A round-based method completes the
            round in which the limit falls.
        timeout : float
            Seconds after which an unanswered task is lost, and after which a run without any
            client ends.
        train_config, evaluate_config : ConfigRecord, optional
            Sent along with every training and every evaluation message.
        evaluate_fn : Callable, optional
            Called at every evaluation, once per cluster, with the number of updates and the
            arrays of the cluster's model. What it returns is averaged over the clusters' clients.
        plan : Plan, optional
            Further limits, evaluation schedule, concurrency, drift.
        observe : Observer
            Called with everything that happens.
        stop_check : StopCheck
            Called between two steps, when `state_dict` is whole. What it returns, unless it is
            empty, ends the run.
        probe : Probe, optional
            Measures models on data that the server has.
        starts : Sequence[Vector]
            Models that the server has pre-trained, one for each distribution.
        identities : Identities, optional
            Says whether clients are who they say; by default they are believed.

        Returns
        -------
        RunResult
            Models, evaluations by number of updates, and who is where.
        """
        plan = plan or Plan()
        self.planned_updates = max_updates or plan.planned_updates
        self.probe, self.starts = probe, starts
        self._spec, self.initial = ModelSpec.of(initial_arrays), initial_arrays
        self.result = RunResult()
        self.train_config = train_config or ConfigRecord()
        if self.validates and VALIDATION_SHARE not in self.train_config:
            self.train_config[VALIDATION_SHARE] = DEFAULT_VALIDATION_SHARE
        loop = Loop(
            self,
            grid,
            plan,
            observe,
            stop_check,
            timeout=timeout,
            train_config=self.train_config,
            evaluate_config=ConfigRecord({**(evaluate_config or {}), **self.test_settings}),
            evaluate_fn=evaluate_fn,
            time_before=self._now(),
            identities=identities,
        )
        self._now = loop.now
        if self.state is None:
            self.initialize(self.spec.unpack(initial_arrays))
            self.restored()
        nothing_missed, self._loaded = self._loaded and loop.keeps_messages, False
        self.summary()
        loop.run(max_updates, nothing_missed)
        ended_at = loop.now()
        self._now = lambda: ended_at
        return self.result

    def summary(self) -> None:
        """Log the hyper-parameters."""
        log.log(INFO, "%s with %s", type(self).__name__, self.parameters)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides how the run continues: a tree of plain values and arrays."""
        return {
            "method": type(self).__name__,
            "clusters": to_tree(self.clusters),
            "bases": to_tree(self.bases),
            "state": to_tree(self.state),
            "dispatch": self.dispatch.state_dict(),
            "protection": to_tree(self.protection.state),
            "progress": to_tree(self.progress),
            "rng": to_tree(self.rng.bit_generator.state),
            "time": self.now(),
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned; `start` then resumes from there.

        Raises
        ------
        ValueError
            The state is another method's.
        """
        if tree.get("method") != type(self).__name__:
            raise ValueError(f"the state is of {tree.get('method')}, not {type(self).__name__}")
        self.clusters = from_tree(Clusters, tree["clusters"])
        self.bases = from_tree(Bases, tree["bases"])
        self.state = from_tree(self.state_type, tree["state"])
        self.dispatch.load_state_dict(tree["dispatch"])
        self.protection.state = from_tree(GuardState, tree["protection"])
        self.progress = from_tree(Progress, tree["progress"])
        self.rng.bit_generator.state = tree["rng"]
        time_before = float(tree["time"])
        self._now, self._loaded = lambda: time_before, True
        self.restored()

    # Flower's four questions of a round. The loop does not ask them: it takes each reply when it
    # arrives.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Raise UserError: a strategy around this one asks, which would train nobody."""
        raise _cannot_be_wrapped(type(self).__name__)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Raise UserError, as `configure_train` does."""
        raise _cannot_be_wrapped(type(self).__name__)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Raise UserError, as `configure_train` does."""
        raise _cannot_be_wrapped(type(self).__name__)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Raise UserError, as `configure_train` does."""
        raise _cannot_be_wrapped(type(self).__name__)


def _cannot_be_wrapped(name: str) -> UserError:
    return UserError(
        f"{name} acts on each update when it arrives: a strategy that works in rounds cannot be "
        f"put around it. Call {name}'s own start(); for differential privacy take client mods, "
        "such as LocalDpMod."
    )


Made = TypeVar("Made", bound=Method)


@dataclass(frozen=True)
class Variant(Generic[Made]):
    """A method under a name of its own, with other defaults. Calling it makes the method.

    Attributes
    ----------
    method : type
        The method.
    parameters_type : type
        Its parameters, with the variant's defaults.
    summary : str
        One line that says what it is.
    """

    method: type[Made]
    parameters_type: type[Any]
    summary: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.summary)

    def __call__(self, parameters: Any = None, seed: int = 0, **arguments: Any) -> Made:
        """Make the method."""
        parameters = self.parameters_type() if parameters is None else parameters
        return self.method(parameters, seed, **arguments)


def average_by_cluster(
    clusters: Clusters,
    updates: Sequence[Update],
    by_examples: bool = True,
    home: Callable[[Update], int] | None = None,
) -> list[Applied]:
    """Replace the model of each cluster by the mean of the models that were trained for it.

    Parameters
    ----------
    clusters : Clusters
        Where the clients are.
    updates : Sequence[Update]
        What came back from some of them.
    by_examples : bool
        Weigh models by their clients' examples; else all alike.
    home : Callable, optional
        Returns the cluster that an update is for; by default its client's.
    """
    homes = [home(u) if home else clusters.main(u.task.client) for u in updates]
    weights = [float(update.num_examples) if by_examples else 1.0 for update in updates]
    together: dict[int, list[int]] = {}
    for index, cluster in enumerate(homes):
        together.setdefault(cluster, []).append(index)
    totals: dict[int, float] = {}
    for cluster, own in together.items():
        totals[cluster] = sum(weights[index] for index in own)
        vectors = [updates[index].vector for index in own]
        clusters.models[cluster].average(vectors, [weights[index] for index in own])
    return [
        Applied(cluster, staleness=0, weight=weight / totals[cluster])
        for cluster, weight in zip(homes, weights, strict=True)
    ]


def staleness_of(method: Questions, update: Update, has_moved: bool) -> int:
    """Return the staleness τ of an update that goes into the main cluster of its client.

    Versions of different clusters say nothing about each other: of a client that has just moved
    all updates are counted that were applied since it received its model.
    """
    if has_moved:
        return method.progress.updates - update.task.updates
    cluster = method.clusters.main(update.task.client)
    return method.models[cluster].version - update.task.version
