"""Constraints on clusters by labels of clients: never across values, and always together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import getLogger
from typing import Any

import numpy as np

from raceme.core import events
from raceme.core.chain import Chain
from raceme.core.clients import Client, Idle
from raceme.core.clusters import Clusters, Weights
from raceme.core.errors import about
from raceme.core.messages import Vector
from raceme.core.progress import Progress
from raceme.core.requests import Answer, InFlight, Outcome, Request, Update
from raceme.core.scheduling import NoState, Scheduler, SelectionContext, from_tree, to_tree
from raceme.core.strategy import InUse, Method, Needs

log = getLogger("raceme")


@dataclass
class Member:
    """A client under constraints.

    Attributes
    ----------
    part : int
        Index of its part.
    name : str
        Its name for the part: its id, or the name of its group.
    online : bool
        Whether it takes part now.
    listed : bool
        Whether an event has named its clusters.
    """

    part: int
    name: str
    online: bool = False
    listed: bool = False


@dataclass
class Sent:
    """A task from sending until its update is applied or given up.

    Attributes
    ----------
    part, name
        Part and name of its client.
    client : str
        Id of the client.
    updates, own_updates : int
        Applied updates at sending: of the run, and of the part.
    """

    part: int
    name: str
    client: str
    updates: int
    own_updates: int


@dataclass
class ConstrainedState:
    """State of a constrained method, besides that of its parts.

    Attributes
    ----------
    values : list[str]
        Value of the label of each part.
    members : dict[str, Member]
        Clients by id.
    clusters : list[tuple[int, int]]
        Part of each cluster, and its id there, by its id in the run.
    tasks : dict[int, Sent]
        Open tasks by number.
    measured : dict[str, dict[str, Any]]
        Last values of measures per cluster.
    woken : int
        The part that was woken last.
    """

    values: list[str] = field(default_factory=list)
    members: dict[str, Member] = field(default_factory=dict)
    clusters: list[tuple[int, int]] = field(default_factory=list)
    tasks: dict[int, Sent] = field(default_factory=dict)
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    woken: int = 0


class ConstrainedMethod(Method):
    """Any method under constraints: clusters never span values of a label, or never divide them.

    `never_across`: every value has a *part*, an instance of the method with its own clients,
    clusters, rounds and state. No model of a part can reach another one. `together`: the clients of
    a value are one client to the method, for which one of them works at a time, the one that has
    been idle longest; so they have one placement.

    Clients without the label form one more part, and no group. A client whose label changes moves
    when it joins again.

    Parameters
    ----------
    make : Callable
        Makes an instance of the method; each has the same hyper-parameters and seed.
    never_across, together : str
        Names of labels; empty for none.

    Attributes
    ----------
    parts : list[Method]
        The instances. A value's part begins when its first client joins, and the first value to
        join has the first one.
    """

    state_type = ConstrainedState
    state: ConstrainedState

    def __init__(
        self, make: Callable[[], Method], never_across: str = "", together: str = ""
    ) -> None:
        self._make, self._never_across, self._together = make, never_across, together
        self.parts = [make()]
        super().__init__()
        first = self.parts[0]
        self.parameters, self.arguments, self.rng = first.parameters, first.arguments, first.rng
        self.clusters: _ClustersOfParts = _ClustersOfParts(self)
        self._ids: dict[tuple[int, int], int] = {}
        self._groups: dict[tuple[int, str], list[str]] = {}
        self._closed: Sent | None = None

    def scheduler(self) -> Scheduler:
        """Return the schedulers of all parts."""
        return _SchedulersOfParts(self)

    @property
    def needs(self) -> Needs:
        """Requirements of the method; each part has models of its own."""
        needs = self.parts[0].needs
        if not self._never_across:
            return needs
        return replace(needs, one_model=False, by_distribution=lambda: False)

    def check(self, clients: int) -> None:
        """Check the hyper-parameters against the number of clients."""
        self.parts[0].check(clients)

    def check_server(self, proxies: int, pretrains: bool) -> None:
        """Check that the server has the samples that the method needs."""
        self.parts[0].check_server(proxies, pretrains)

    def __str__(self) -> str:
        """Return the name of the parts' class."""
        return str(self.parts[0])

    def summary(self) -> None:
        """Log the hyper-parameters and the constraints."""
        self.parts[0].summary()
        if self._never_across:
            log.info("Clusters never span two values of the label %s", self._never_across)
        if self._together:
            log.info("Clients with the same label %s are always together", self._together)

    # Parts.

    def initialize(self, vector: Vector) -> None:
        """Begin the first part, which the first value to join will have."""
        self.state = ConstrainedState()
        self._begin(vector)

    def restored(self) -> None:
        """Derive groups, ids and views from the state."""
        self._ids = {own: cluster for cluster, own in enumerate(self.state.clusters)}
        self._groups = {}
        clients = self.progress.fleet.clients
        for client, member in self.state.members.items():
            self._groups.setdefault((member.part, member.name), []).append(client)
            if member.name == client:
                self.parts[member.part].progress.fleet.clients[client] = clients[client]
        self.clusters.refresh()

    def _check_loaded(self, others: Iterable[Vector] = ()) -> None:
        super()._check_loaded(others)
        for index, part in enumerate(self.parts):
            self._connect(part)
            part._check_loaded()
            self._listen(index, part)

    def _begin(self, vector: Vector) -> list[int]:
        """Initialize the last part; return its clusters."""
        index, part = len(self.parts) - 1, self.parts[-1]
        self._connect(part)
        part.initialize(vector)
        part.restored()
        self._listen(index, part)
        return [self._add_cluster(index, cluster) for cluster in part.models]

    def _connect(self, part: Method) -> None:
        """Give a part what a run gives a method."""
        part._spec, part.initial, part._now = self._spec, self.initial, self.now
        part.train_config, part.planned_updates = self.train_config, self.planned_updates
        part.probe, part.starts = self.probe, self.starts
        # It gets updates that have passed the features, and keeps the models that these need.
        part.features = _Bases() if self.features.keeps_bases else Chain()
        if not self._never_across:
            part.result = self.result

    def _listen(self, index: int, part: Method) -> None:
        part.clusters.report_to(lambda change: self._changed(index, change))
        part.report = lambda event: self._reported(index, event)
        part.step_of = lambda name: self.step_of(self._worker(index, name))

    def _part_of(self, value: str) -> int:
        """Return the part of a value; begin it if it is new."""
        values = self.state.values
        if value in values:
            return values.index(value)
        values.append(value)
        if len(values) > 1:
            part = self._make()
            own = np.random.default_rng(self.rng.integers(2**63, size=4))
            part.rng.bit_generator.state = own.bit_generator.state
            self.parts.append(part)
            made = tuple(self._begin(self.spec.unpack(self.initial)))
            self.clusters.refresh()
            if made:
                self.clusters.tell(
                    events.ClustersChanged(0.0, 0, events.ClusterChange.FOUND, {}, (), made)
                )
        return len(values) - 1

    # Clients.

    def home(self, client: str) -> tuple[Method, Member]:
        """Return the part of a client, and what is known of it."""
        member = self.state.members.get(client) or Member(0, client)
        return self.parts[member.part], member

    def others_online(self, client: str) -> bool:
        """Return whether another member of a client's group is online."""
        _, member = self.home(client)
        group = self._groups.get((member.part, member.name), ())
        return any(name != client and self.state.members[name].online for name in group)

    def settle(self, client: str) -> None:
        """Find the part and the group of a client that joins, by its present labels."""
        seen, members = self.progress.fleet.clients[client], self.state.members
        value = seen.label(self._never_across) if self._never_across else ""
        mates = seen.label(self._together) if self._together else ""
        # An id of a client is printable, unlike this.
        name = f"{self._together}\t{mates}" if mates else client
        index, member = self._part_of(value), members.get(client)
        if member is None or (member.part, member.name) != (index, name):
            if self._never_across and not value:
                log.warning(
                    "%s has no label %s: it shares clusters only with others that have none",
                    client,
                    self._never_across,
                    extra=about(client),
                )
            members[client] = Member(index, name)
            self._groups.setdefault((index, name), []).append(client)
            if member is not None:
                self._remove(client, member, seen)
        self._update(index, name)
        sizes, group = self.progress.fleet.sizes, self._groups[index, name]
        if client in sizes:
            stated = sum(sizes.get(mate, 0) for mate in group)
            self.parts[index].progress.fleet.heard(name, stated)

    def _remove(self, client: str, member: Member, seen: Client) -> None:
        """Take a client whose label has changed out of its former part or group."""
        former = self._groups[member.part, member.name]
        former.remove(client)
        if former:
            self._update(member.part, member.name)
        else:
            # To the former part it is away for good.
            part = self.parts[member.part]
            part.progress.fleet.clients[member.name] = replace(seen, node_id=None)
        if member.listed:
            move = events.ClustersChanged(0.0, 0, events.ClusterChange.MOVE, {client: {}})
            self.clusters.tell(move)

    def _update(self, index: int, name: str) -> None:
        """Bring what a part knows of a client up to date."""
        known = self.progress.fleet.clients
        group = [known[client] for client in self._groups[index, name]]
        client = group[0]
        if client.client_id != name:
            node = next((mate.node_id for mate in group if mate.node_id is not None), None)
            examples = sum(mate.num_examples for mate in group)
            client = Client(name, examples, client.group, node)
        self.parts[index].progress.fleet.clients[name] = client

    def _worker(self, index: int, name: str) -> str:
        """Return a client of a name, one that is online if there is any."""
        group, members = self._groups.get((index, name), [name]), self.state.members
        return next((mate for mate in group if mate in members and members[mate].online), group[0])

    def on_join(self, client: Client) -> None:
        """Add a client to its part, unless another one of its group is there already."""
        part, member = self.home(client.client_id)
        if not self.others_online(client.client_id):
            part.on_join(part.progress.fleet.clients[member.name])
        member.online = True
        if not member.listed and part.clusters.is_placed(member.name):
            member.listed = True
            placed = {client.client_id: self.placement(client.client_id)}
            self.clusters.tell(events.ClustersChanged(0.0, 0, events.ClusterChange.ASSIGN, placed))
        self.clusters.refresh()

    def on_leave(self, client: str) -> None:
        """Mark a client as offline in its part, if no other one of its group is online."""
        part, member = self.home(client)
        member.online = False
        if (member.part, member.name) in self._groups:
            self._update(member.part, member.name)
        if not self.others_online(client):
            part.on_leave(member.name)
        self.clusters.refresh()

    # Clusters.

    def _add_cluster(self, index: int, cluster: int) -> int:
        self._ids[index, cluster] = len(self.state.clusters)
        self.state.clusters.append((index, cluster))
        return self._ids[index, cluster]

    def of_run(self, index: int, cluster: int) -> int:
        """Return the id in the run of a part's cluster."""
        return self._ids[index, cluster]

    def _weights(self, index: int, weights: Weights) -> dict[int, float]:
        return {self._ids[index, cluster]: weight for cluster, weight in weights.items()}

    def _changed(self, index: int, change: events.ClustersChanged) -> None:
        """Report a change of a part's clusters, with ids of the run."""
        made = tuple(self._add_cluster(index, cluster) for cluster in change.made)
        memberships = {}
        for name, weights in change.memberships.items():
            for client in self._groups.get((index, name), ()):
                memberships[client] = self._weights(index, weights)
                self.state.members[client].listed = True
        gone = tuple(self._ids[index, cluster] for cluster in change.gone)
        self.clusters.refresh()
        if memberships or made or gone:
            self.clusters.tell(replace(change, memberships=memberships, made=made, gone=gone))

    def _reported(self, index: int, event: events.Event) -> None:
        """Report what a part has measured, with clients and clusters of the run."""
        if isinstance(event, events.Measured):
            schema, values = event.schema, dict(event.values)
            updates = event.updates - self.parts[index].progress.updates
            if schema.per == "cluster":
                values[schema.value] = self._measured(index, event)
            elif schema.per == "client":
                values[schema.value] = {
                    client: value
                    for name, value in event.value.items()
                    for client in self._groups.get((index, name), ())
                }
            elif isinstance(values.get("client"), str):
                values["client"] = self._worker(index, values["client"])
            event = replace(event, updates=self.progress.updates + updates, values=values)
        self.report(event)

    def _measured(self, index: int, event: events.Measured) -> dict[int, Any]:
        """Return a measure of a part's clusters, with the last one of the other parts'."""
        known = self.state.measured.setdefault(event.name, {})
        for cluster in list(known):
            if self.state.clusters[int(cluster)][0] == index:
                del known[cluster]
        for cluster, value in event.value.items():
            if event.schema.figure == "graph":
                value = [self._ids[index, other] for other in value]
            known[str(self._ids[index, cluster])] = value
        return {
            int(cluster): tuple(value) if isinstance(value, list) else value
            for cluster, value in known.items()
        }

    # Queries.

    def placement(self, client: str) -> Weights:
        """Return the clusters that serve a client, with weights."""
        part, member = self.home(client)
        return self._weights(member.part, part.placement(member.name))

    @property
    def in_use(self) -> InUse:
        """The models that clients use in all parts."""
        uses = [part.in_use for part in self.parts]
        models = None
        if any(use.models is not None for use in uses):
            models = {
                self._ids[index, cluster]: model
                for index, (part, use) in enumerate(zip(self.parts, uses, strict=True))
                for cluster, model in (part.models if use.models is None else use.models).items()
            }

        def own(clients: Collection[str]) -> Iterable[tuple[str, Vector]]:
            wanted: list[dict[str, list[str]]] = [{} for _ in uses]
            for client in clients:
                _, member = self.home(client)
                wanted[member.part].setdefault(member.name, []).append(client)
            for use, named in zip(uses, wanted, strict=True):
                for name, vector in use.own(list(named)):
                    yield from ((client, vector) for client in named[name])

        def on_step(client: str, step: int) -> Weights:
            _, member = self.home(client)
            return self._weights(member.part, uses[member.part].on_step(member.name, step))

        return InUse(models, own, on_step)

    def similarity(self) -> tuple[list[str], np.ndarray] | None:
        """Return clients and their similarities; those of two parts are unknown."""
        clients: list[str] = []
        blocks: list[tuple[int, np.ndarray]] = []
        for index, part in enumerate(self.parts):
            if (found := part.similarity()) is not None:
                rows = [
                    (client, row)
                    for row, name in enumerate(found[0])
                    for client in self._groups.get((index, name), ())
                ]
                places = [row for _, row in rows]
                blocks.append((len(clients), found[1][np.ix_(places, places)]))
                clients += [client for client, _ in rows]
        if not blocks:
            return None
        whole = np.full((len(clients), len(clients)), np.nan, blocks[0][1].dtype)
        for start, block in blocks:
            whole[start : start + len(block), start : start + len(block)] = block
        return clients, whole

    # Work.

    def requests(self, moment: SelectionContext) -> Iterable[Request]:
        """Return the requests of all parts to their idle clients."""
        fleet, members = moment.fleet, self.state.members
        working = {
            (member.part, member.name)
            for task in self.progress.in_flight.values()
            if (member := members[task.client]).name != task.client and member.online
        }
        idle: list[dict[str, bool]] = [{} for _ in self.parts]
        workers: dict[tuple[int, str], str] = {}
        for client in self.progress.idle:
            member = members[client]
            place = member.part, member.name
            if member.name != client:
                rests = fleet.clients[client].ready_at > moment.now
                if rests or place in working:
                    continue
            idle[member.part][member.name] = True
            workers.setdefault(place, client)
        asked = []
        for index, part in enumerate(self.parts):
            own = part.progress.fleet
            context = replace(moment, fleet=own, idle=Idle(idle[index], own.clients), rng=part.rng)
            for work in part.requests(context):
                models = work.models and tuple(self._ids[index, k] for k in work.models)
                place = index, work.client
                client = workers[place] if place in workers else self._worker(*place)
                asked.append(replace(work, client=client, models=models))
        return asked

    def work_of_part(self, work: Request) -> tuple[Method, Request]:
        """Return the part of a request, and the request with its client and clusters."""
        part, member = self.home(work.client)
        models = work.models and tuple(self.state.clusters[k][1] for k in work.models)
        return part, replace(work, client=member.name, models=models)

    def task_of_part(self, task: InFlight) -> tuple[Method, InFlight]:
        """Return the part of a task, and the task with its client, clusters and updates."""
        sent = self.state.tasks.get(task.number)
        if sent is None:
            # It was closed just now.
            assert self._closed is not None, "an open task is in the state"
            sent = self._closed
        clusters = self.state.clusters
        return self.parts[sent.part], replace(
            task,
            client=sent.name,
            cluster=clusters[task.cluster][1],
            candidates={clusters[k][1]: version for k, version in task.candidates.items()},
            updates=sent.own_updates,
        )

    def of_parts(self, update: Update) -> tuple[Method, Update]:
        """Return the part of an update, and the update of its task."""
        part, task = self.task_of_part(update.task)
        return part, replace(update, task=task)

    def of_the_run(self, update: Update) -> Update:
        """Return an update of a part with its client, clusters and updates in the run."""
        task, sent = update.task, self.state.tasks[update.task.number]
        candidates = {self._ids[sent.part, k]: v for k, v in task.candidates.items()}
        cluster = self._ids[sent.part, task.cluster]
        return replace(
            update,
            task=replace(
                task,
                client=sent.client,
                cluster=cluster,
                candidates=candidates,
                updates=sent.updates,
            ),
        )

    def open_task(self, task: InFlight, work: Request | None = None) -> None:
        """Let a task's part keep its base models."""
        part, member = self.home(task.client)
        self.state.tasks[task.number] = Sent(
            member.part, member.name, task.client, task.updates, part.progress.updates
        )
        part.open_task(self.task_of_part(task)[1], work)
        super().open_task(task, work)

    def close_task(self, task: InFlight) -> None:
        """Let a task's part release its base models."""
        part, own = self.task_of_part(task)
        part.close_task(own)
        super().close_task(task)
        if task.number in self.state.tasks:
            self._closed = self.state.tasks.pop(task.number)

    def _keeps_base_of(self, task: InFlight) -> bool:
        """Return False: parts keep them."""
        return False

    def base_of(self, update: Update) -> Vector:
        """Return the model that a client started from."""
        part, own = self.of_parts(update)
        return part.base_of(own)

    def on_answer(self, answer: Answer) -> None:
        """Hand an answer to the part that asked."""
        part, task = self.task_of_part(answer.task)
        part.on_answer(replace(answer, task=task))
        self.clusters.refresh()

    def applied(self, updates: Sequence[Update]) -> Sequence[Outcome]:
        """Let the part whose scheduler has released updates aggregate them."""
        index = self.state.tasks[updates[0].task.number].part
        part, own = self.parts[index], [self.of_parts(update)[1] for update in updates]
        outcomes = part.applied(own)
        for update in own:
            part.progress.count_update(update.task.client)
        self.clusters.refresh()
        return [replace(each, cluster=self._ids[index, each.cluster]) for each in outcomes]

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run and of each part."""
        return {
            "method": type(self).__name__,
            "state": to_tree(self.state),
            "parts": [part.state_dict() for part in self.parts],
            "features": self.features.state_dict(),
            "progress": to_tree(self.progress),
            "time": self.now(),
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        if tree.get("method") != type(self).__name__:
            raise ValueError(f"the state is of {tree.get('method')}, not {type(self).__name__}")
        self.state = from_tree(ConstrainedState, tree["state"])
        self.features.load_state_dict(tree["features"])
        self.progress = from_tree(Progress, tree["progress"])
        self.parts = [self._make() for _ in tree["parts"]]
        for part, own in zip(self.parts, tree["parts"], strict=True):
            part.load_state_dict(own)
        self.rng = self.parts[0].rng
        time_before = float(tree["time"])
        self._now, self._loaded = lambda: time_before, True
        self.restored()


class _Bases(Chain):
    """No features, but the models that clients train from are kept."""

    @property
    def keeps_bases(self) -> bool:
        """Always."""
        return True


class _ClustersOfParts(Clusters):
    """The clusters of a constrained method's parts, to read, with ids of the run."""

    def __init__(self, method: ConstrainedMethod) -> None:
        super().__init__()
        self._method = method

    def refresh(self) -> None:
        """Look for the models of all parts again."""
        self.models = {
            self._method.of_run(index, cluster): model
            for index, part in enumerate(self._method.parts)
            for cluster, model in part.models.items()
        }

    def tell(self, change: events.ClustersChanged) -> None:
        """Report a change."""
        self._report(change)

    def of(self, client: str) -> Weights:
        """Return the clusters that serve a client, with weights."""
        return self._method.placement(client)

    def main(self, client: str) -> int:
        """Return the cluster with a client's largest weight."""
        part, member = self._method.home(client)
        return self._method.of_run(member.part, part.clusters.main(member.name))

    def is_placed(self, client: str) -> bool:
        """Return whether a client has a cluster."""
        part, member = self._method.home(client)
        return part.clusters.is_placed(member.name)

    def clients(self, cluster: int, online_only: bool = True) -> list[str]:
        """Return the clients of a cluster, in order of joining."""
        index, own = self._method.state.clusters[cluster]
        placed = self._method.parts[index].clusters.members
        return [
            client
            for client, member in self._method.state.members.items()
            if member.part == index
            and own in placed.get(member.name, ())
            and (member.online or not online_only)
        ]

    def size(self, cluster: int, online_only: bool = True) -> int:
        """Return the number of a cluster's clients."""
        return len(self.clients(cluster, online_only))

    def largest(self) -> int:
        """Return the largest of the parts' largest clusters, the first at ties."""
        largest = [
            self._method.of_run(index, part.clusters.largest())
            for index, part in enumerate(self._method.parts)
            if part.models
        ]
        return max(largest, key=self.size)

    def continuations(self, cluster: int) -> list[int]:
        """Return the successors of a possibly removed cluster."""
        known = self._method.state.clusters
        if not 0 <= cluster < len(known):
            return []
        index, own = known[cluster]
        found = self._method.parts[index].clusters.continuations(own)
        return [self._method.of_run(index, each) for each in found]


class _SchedulersOfParts(Scheduler):
    """The schedulers of a constrained method's parts, as one."""

    state: NoState

    def __init__(self, method: ConstrainedMethod) -> None:
        self.state, self._method = NoState(), method

    @property
    def _all(self) -> list[Scheduler]:
        return [part.scheduling for part in self._method.parts]

    def _of(self, client: str) -> tuple[Scheduler, str]:
        part, member = self._method.home(client)
        return part.scheduling, member.name

    def _released(self, updates: Sequence[Update]) -> list[Update]:
        return [self._method.of_the_run(update) for update in updates]

    @property
    def rounds(self) -> int | None:
        """Completed rounds or windows of the part that is furthest ahead."""
        counts = [each.rounds for each in self._all]
        return max((count for count in counts if count is not None), default=None)

    def choose(self, moment: SelectionContext) -> Sequence[Client]:
        """Return no client: each part chooses its own."""
        return ()

    def settings(self, work: Request) -> Mapping[str, str | int | float | bool]:
        """Return the part's settings in the message of a work item."""
        part, own = self._method.work_of_part(work)
        return part.scheduling.settings(own)

    def sent(self, task: InFlight, now: float) -> None:
        """Record that work was sent to a client."""
        part, own = self._method.task_of_part(task)
        part.scheduling.sent(own, now)

    def accept(self, update: Update, now: float) -> Sequence[Update]:
        """Accept an update; return those of its part to aggregate now."""
        part, own = self._method.of_parts(update)
        name, progress = own.task.client, part.progress
        progress.fleet.heard(name, update.num_examples)
        released = part.scheduling.accept(own, now)
        progress.trained_steps[name] = own.task.step
        return self._released(released)

    def lost(self, task: InFlight, now: float) -> Sequence[Update]:
        """Record work without an update."""
        part, own = self._method.task_of_part(task)
        return self._released(part.scheduling.lost(own, now))

    def left(self, client: str, now: float) -> Sequence[Update]:
        """Record that a client went offline; another one of its group may do its work."""
        part, name = self._of(client)
        others = self._method.others_online(client)
        tasks = self._method.progress.in_flight.values()
        if others and not any(task.client == client for task in tasks):
            return ()
        released = self._released(part.left(name, now))
        if others:
            part.joined(name)
        return released

    def joined(self, client: str) -> None:
        """Record that a client joined; its labels name its part and its group."""
        self._method.settle(client)
        if not self._method.others_online(client):
            part, name = self._of(client)
            part.joined(name)

    def wake_at(self) -> float:
        """Return the next wake-up time of any part."""
        return min(each.wake_at() for each in self._all)

    def wake(self, now: float) -> tuple[Collection[int], Sequence[Update]]:
        """Wake one part that is due, in turn: the loop applies updates of one part at a time."""
        parts, state = self._all, self._method.state
        turn = [(state.woken + 1 + ahead) % len(parts) for ahead in range(len(parts))]
        due = next(index for index in turn if parts[index].wake_at() <= now)
        state.woken = due
        late, released = parts[due].wake(now)
        self.timeout_reason = parts[due].timeout_reason
        self.backs_off_when_late = parts[due].backs_off_when_late
        return late, self._released(released)

    def invited(self, client: str) -> bool:
        """Return whether a client may hold its work as an invitation."""
        part, name = self._of(client)
        return part.invited(name)

    def is_quiescent(self, client: str, step: int) -> bool:
        """Return whether a client will never train again while its data stay at a step."""
        part, name = self._of(client)
        return part.is_quiescent(name, step)

    def hopeless(self) -> str:
        """Return why no part can progress, or an empty text."""
        reasons = [each.hopeless() for each in self._all]
        return reasons[0] if all(reasons) else ""
