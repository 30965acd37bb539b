"""What asynchronous and round-based strategies share: models out, tests, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from logging import INFO, getLogger
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from raceme import events
from raceme.messages import ModelSpec
from raceme.strategies.evaluation import ClientScore, as_record, evaluated, read_scores, sweep
from raceme.strategies.method import Method
from raceme.strategies.model import Progress
from raceme.strategies.packing import Packer
from raceme.strategies.plan import Plan
from raceme.strategies.replies import Task
from raceme.strategies.state import from_tree, to_tree
from raceme.timeline import Timeline, timeline_of

log = getLogger("raceme")

Rest = Callable[[], str]
"""Called between two steps, when the state is whole and can be saved. What it returns, unless it
is empty, ends the run: it is the reason."""


def go_on() -> str:
    """Find no reason to end a run."""
    return ""


class Conduct(Method):
    """A method with its state, and everything around it that does not depend on its loop.

    Parameters
    ----------
    parameters : dataclass, optional
        Hyper-parameters; by default the class's `parameters_type`, made without arguments.
    seed : int
        Decides whatever the method leaves to chance.

    Attributes
    ----------
    planned_updates : int
        Client updates after which the run ends, for schedules that depend on its length.
    """

    parameters_type: ClassVar[type[Any]]
    state_type: ClassVar[type[Any]]

    def __init__(self, parameters: Any = None, seed: int = 0) -> None:
        self.parameters = self.parameters_type() if parameters is None else parameters
        self.rng = np.random.default_rng(np.random.SeedSequence([seed, 0x57A7E9]))
        self.progress = Progress()
        self.planned_updates = 0
        self.state: Any = None
        self.spec: ModelSpec | None = None
        self._plan = Plan()
        self._observe: events.Observer = events.ignore
        self._timeline: Timeline | None = None
        self._ttl = 3600.0
        self._packing: Packer | None = None
        self._reason = ""
        self._at_rest: Rest = go_on
        self._loaded = False
        self._time_before = 0.0

    def _prepare(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_updates: int,
        timeout: float,
        plan: Plan | None,
        observe: events.Observer,
        at_rest: Rest,
    ) -> bool:
        """Get ready to run: with a new state, or to go on from the one that there is.

        Returns
        -------
        bool
            True if nothing has been missed: the grid was brought back together with this state,
            and what was open then still is.
        """
        self._plan, self._observe, self._ttl = plan or Plan(), observe, timeout
        self._at_rest = at_rest
        self._timeline = timeline_of(grid, self._time_before)
        self.planned_updates = num_updates
        self.spec = ModelSpec.of(initial_arrays)
        self._packing = Packer(self.spec)
        if self.state is None:
            self.initialize(self.spec.unpack(initial_arrays))
        missed_nothing = self._loaded and self._timeline.keeps_messages
        if not missed_nothing:
            self._disconnect()
        self._loaded, self._time_before = False, 0.0
        self._reason = ""
        self.summary()
        return missed_nothing

    def _disconnect(self) -> None:
        """Forget nodes and open tasks: they belong to the grid of an earlier start."""
        for task in self.progress.in_flight.values():
            self.on_close(task)
        self.progress.in_flight.clear()
        for client in self.progress.fleet.disconnect():
            self.remove_client(client)

    # Models on their way out.

    def _parcel(self, client: str) -> tuple[Task, dict[str, ArrayRecord]]:
        """Number a new task of a client, and return the arrays that it is sent for it."""
        clusters, models = self.models_for(client), self.models
        records, size = self._packer.pack_some(models, clusters)
        attached = self.attachments(client)
        several = len(clusters) > 1
        cluster = self.cluster_of(client) if several else clusters[0]
        task = Task(
            number=self.progress.tasks,
            client=client,
            cluster=cluster,
            version=models[cluster].version,
            updates=self.progress.updates,
            sent_at=self._clock.now(),
            bytes_down=size + sum(record.count_bytes() for record in attached.values()),
            candidates={k: models[k].version for k in clusters} if several else {},
        )
        self.progress.tasks += 1
        return task, {**records, **attached}

    # Evaluation.

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Make one message for every online client, with the model of its cluster."""
        return sweep(self.progress.fleet, self._record_for, config, self._ttl)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Average what the clients measured: every client counts the same."""
        return self._report(read_scores(replies, self.progress.fleet, self.cluster_of))

    def _record_for(self, client: str) -> ArrayRecord:
        """Return the model of a client's cluster."""
        cluster = self.cluster_of(client)
        return self._packer.pack(cluster, self.models[cluster])[0]

    def _report(self, scores: Mapping[str, ClientScore]) -> MetricRecord | None:
        """Report an evaluation, and end the run if it reaches the target."""
        if not scores:
            return None
        report = evaluated(self._clock.now(), self.progress.updates, len(self.models), scores)
        self._observe(report)
        if self._plan.is_reached(report.accuracy):
            self._reason = f"the target accuracy of {self._plan.target_accuracy:g} was reached"
        return as_record(report)

    def _emit(self, event: events.Event) -> None:
        """Report something that the method did."""
        self._observe(event)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides how the run goes on: a tree of plain values and arrays."""
        return {
            "method": type(self).__name__,
            "state": to_tree(self.state),
            "progress": to_tree(self.progress),
            "rng": to_tree(self.rng.bit_generator.state),
            "time": self.now(),
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned; `start` then goes on from there.

        Raises
        ------
        ValueError
            The state is another method's.
        """
        if tree.get("method") != type(self).__name__:
            raise ValueError(f"the state is of {tree.get('method')}, not {type(self).__name__}")
        self.state = from_tree(self.state_type, tree["state"])
        self.progress = from_tree(Progress, tree["progress"])
        self.rng.bit_generator.state = tree["rng"]
        self._loaded, self._time_before = True, float(tree["time"])

    def summary(self) -> None:
        """Log the hyper-parameters."""
        log.log(INFO, "%s with %s", type(self).__name__, self.parameters)

    def now(self) -> float:
        """Return the time on the grid's clock in seconds; before the start that of the state."""
        return self._time_before if self._timeline is None else self._timeline.now()

    @property
    def _clock(self) -> Timeline:
        assert self._timeline is not None, "start() sets the clock"
        return self._timeline

    @property
    def _spec(self) -> ModelSpec:
        assert self.spec is not None, "start() sets the specification"
        return self.spec

    @property
    def _packer(self) -> Packer:
        assert self._packing is not None, "start() sets the packer"
        return self._packing


def push_one(grid: Grid, message: Message) -> str | None:
    """Send one message; None if the grid would not take it."""
    return next(iter(grid.push_messages([message])), None)
