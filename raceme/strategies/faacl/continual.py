"""C-FAACL: FAACL for clients with sequences of tasks.

Zhang, "Asymmetric Clustering in Federated Continual Learning" (C-FAACL), thesis, Waterloo 2024.
FAACL finds the first clusters. A client with new data (a new step of its data) trains a model of
its own on them and searches for their cluster: first among those of its former tasks, then among
all, by comparing models on its new data and on a remembered sample of the former task (Algorithms 8
and 9). They match if the cluster's model is not worse on the new data and the new model is not
worse on the remembered sample. Only the sample's own cluster and the new model are evaluated on a
sample, so that the cost of a search is linear in the number of clusters. Without a match the data
are a new concept, and the new model founds a cluster (Algorithm 10). Clusters are then trained,
compared and merged as in FAACL.

Each client remembers a sample of its validation data of every task, and the server the task's
cluster. As in the thesis, the server lends such samples to other clients. With ``borrow=losses``,
our own, the new model is sent to the sample instead, and only losses leave a client.

Our readings where the thesis is silent: a cluster without clients keeps its model and may be found
again; searches do not find clusters founded in the same search; a search is followed by Flat FAACL
on the present clusters; a former task is evaluated with the model of its cluster. A missing answer
does not count as a rejection: a client without a match that lacks an answer founds no cluster, but
trains its own model again in the next round and repeats the search.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

import raceme.strategies.faacl as keys
from raceme.core.clusters import Model, Weights
from raceme.core.errors import UserError, about
from raceme.core.events import grouped
from raceme.core.messages import COMPUTE_SCALE, LOSSES, ON, Vector, forward_cost, numbered, to_array
from raceme.core.options import option
from raceme.core.requests import (
    Answer,
    InFlight,
    InvalidReplyError,
    Outcome,
    Outcomes,
    Request,
    Update,
)
from raceme.core.scheduling import SelectionContext
from raceme.core.strategy import Needs
from raceme.flower.messages import array_record
from raceme.strategies.faacl.strategy import (
    ASKING_SECONDS,
    FAACL,
    START,
    FAACLParameters,
    FAACLState,
    fewest_samples,
    log,
    losses_of,
    no_worse,
    validation_share,
)

Item = TypeVar("Item")

_SEARCHING = (keys.MATCH, keys.LEND)

VALIDATION = "validation"
OWN, LENDING, OTHERS = "search-own", "lend", "search-others"
"""Stages of a search, which are also the phases of the traffic counts."""


@dataclass(frozen=True)
class CFAACLParameters(FAACLParameters):
    """Hyper-parameters of C-FAACL."""

    remembered: int = option(50, "|S|: samples of each task that a client remembers", low=1)
    borrow: str = option(
        "samples",
        "content sent to test another client's remembered sample: samples (the thesis), or "
        "models, so that only losses leave it: losses (our own)",
        among=("samples", "losses"),
    )
    learn_epochs: int = option(
        20, "passes over the samples of a new task with which a client trains its own model", low=1
    )


@dataclass(frozen=True)
class Remembered:
    """A remembered sample of a former task.

    Attributes
    ----------
    cluster : int
        Cluster of the task.
    client : str
        Client that stores the sample.
    step : int
        Step of the client's data.
    """

    cluster: int
    client: str
    step: int


@dataclass
class ConceptRequest:
    """Evaluations of one client in a stage.

    Attributes
    ----------
    clusters : dict[str, list[int]]
        Clusters whose models are evaluated, by set of samples: ``validation`` (new data),
        ``memory-0`` (remembered sample of a step), ``borrowed-0`` (sample of another client).
    clients : dict[str, list[str]]
        Clients whose local models are evaluated, by set of samples.
    steps : list[int]
        Steps of the remembered samples used.
    borrowed : list[Remembered]
        Samples of other clients.
    """

    clusters: dict[str, list[int]] = field(default_factory=dict)
    clients: dict[str, list[str]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    borrowed: list[Remembered] = field(default_factory=list)

    def measure(self, name: str, cluster: int, client: str) -> None:
        """Add the models of a cluster and of a client to a set of samples."""
        _append_once(self.clusters.setdefault(name, []), cluster)
        _append_once(self.clients.setdefault(name, []), client)

    @property
    def sets(self) -> list[str]:
        """Sets of samples, in the client's order."""
        remembered = [numbered(keys.MEMORY, step) for step in self.steps]
        borrowed = [numbered(keys.BORROWED, index) for index in range(len(self.borrowed))]
        return [name for name in (VALIDATION, *remembered, *borrowed) if name in self.clusters]

    def models(self) -> tuple[list[int], list[str]]:
        """Return the clusters and the clients whose models are evaluated on any set."""
        clusters: list[int] = []
        clients: list[str] = []
        for name in self.sets:
            for cluster in self.clusters[name]:
                _append_once(clusters, cluster)
            for client in self.clients[name]:
                _append_once(clients, client)
        return clusters, clients

    def rows(self, name: str) -> list[int]:
        """Return the positions among :meth:`models` of the models of a set."""
        clusters, clients = self.models()
        first = [clusters.index(cluster) for cluster in self.clusters[name]]
        return first + [len(clusters) + clients.index(client) for client in self.clients[name]]


@dataclass
class CFAACLState(FAACLState):
    """State of C-FAACL besides FAACL's: former tasks, and the progress of a search.

    Attributes
    ----------
    memory : dict[str, dict[int, int]]
        Cluster of each client's data of each step: the C of its {S, C}.
    local : dict[str, Vector]
        Local models of the searching clients.
    learned_at : dict[str, int]
        Step of the data of each local model.
    joins : dict[str, int]
        Clusters found in this search, by client.
    unanswered : dict[str, bool]
        Clients without a match that lack an answer in this search.
    stage : str
        Stage of the search; empty without a search.
    tested : dict[str, list[Remembered]]
        Samples that each client is compared on in this stage, in order.
    requests : dict[str, ConceptRequest]
        Evaluations of each client in this stage.
    tried : dict[str, bool]
        Clients queried in this stage.
    answers : dict[str, dict[str, NDArray]]
        Losses by client and set of samples, each of shape (models, samples).
    lent : dict[str, dict[str, NDArray]]
        Samples lent in this search, by client and name.
    """

    memory: dict[str, dict[int, int]] = field(default_factory=dict)
    local: dict[str, Vector] = field(default_factory=dict)
    learned_at: dict[str, int] = field(default_factory=dict)
    joins: dict[str, int] = field(default_factory=dict)
    unanswered: dict[str, bool] = field(default_factory=dict)
    stage: str = ""
    tested: dict[str, list[Remembered]] = field(default_factory=dict)
    requests: dict[str, ConceptRequest] = field(default_factory=dict)
    tried: dict[str, bool] = field(default_factory=dict)
    answers: dict[str, dict[str, NDArray[np.float64]]] = field(default_factory=dict)
    lent: dict[str, dict[str, NDArray[Any]]] = field(default_factory=dict)


def matches(
    new: tuple[NDArray[np.float64], NDArray[np.float64]],
    old: tuple[NDArray[np.float64], NDArray[np.float64]],
    epsilon: float,
    alpha: float,
) -> bool:
    """Return whether new data belong to a cluster's concept.

    The thesis prints neither the hypotheses nor ε. Our reading: the cluster's model is not worse by
    more than ε than the new one on the new data, nor the new model on the remembered sample.

    Parameters
    ----------
    new : tuple
        l1 and l2: losses of the cluster's and the new model on the new data. Shape (n,).
    old : tuple
        l3 and l4: losses of both on the remembered sample. Shape (s,).
    epsilon, alpha : float
        ε: tolerance; α: level of Wilcoxon's test.
    """
    (l1, l2), (l3, l4) = new, old
    return no_worse(l2, l1, epsilon, alpha) and no_worse(l3, l4, epsilon, alpha)


def _append_once(values: list[Item], value: Item) -> None:
    if value not in values:
        values.append(value)


class CFAACL(FAACL):
    """FAACL for task sequences: recognises known concepts and detects new ones (C-FAACL)."""

    parameters_type = CFAACLParameters
    state_type = CFAACLState
    parameters: CFAACLParameters
    state: CFAACLState

    needs = Needs(
        kinds=frozenset({keys.LEARN, keys.LEND, LOSSES, keys.MATCH}),
        settings=frozenset({keys.MEMORY_STEPS, keys.PAIRS, keys.REMEMBERED}),
        validation=True,
    )

    def check(self, clients: int) -> None:
        """Raise UserError if the remembered samples are too few for a test."""
        remembered, alpha = self.parameters.remembered, self.parameters.alpha
        if remembered < (needed := fewest_samples(alpha)):
            raise UserError(
                f"c-faacl.remembered is {remembered}, and a test at level {alpha:g} needs {needed} "
                "samples: no task would ever be recognised. Take more, or a larger c-faacl.alpha."
            )

    def serving(self, client: str, step: int) -> Weights:
        """Return the present cluster of a client's data of a step."""
        known = self.state.memory.get(client, {})
        if step not in known:
            return self.placement(client)
        return {self.state.supported.heir(known[step]): 1.0}

    # Before a round: searches, then Cluster Support and Cluster Merge.

    def _queries(self, context: SelectionContext) -> Sequence[Request] | None:
        """Return the evaluations of searches and comparisons; None if the round may start."""
        asked: Sequence[Request] | None = self._search(context)
        if asked is None:
            asked = super()._queries(context)
        if asked is None and not self.scheduling.state.running:
            self._notice_new_data(self.state.memory)
        return asked

    def _notice_new_data(self, clients: Iterable[str]) -> None:
        """Make clients with a new step of data cold."""
        for client in clients:
            known = self.state.memory.get(client)
            if known is not None and (self.step_of(client) or 0) not in known:
                self.state.cold[client] = True

    def on_sent(self, task: InFlight) -> None:
        """Record a training, or a query, of which there is one per client and stage."""
        super().on_sent(task)
        if task.kind in _SEARCHING:
            self.state.tried[task.client] = True

    def on_answer(self, answer: Answer) -> None:
        """Process losses or lent samples."""
        if answer.task.kind in _SEARCHING:
            self._process_search(answer)
        else:
            super().on_answer(answer)

    # A round.

    def request_for(self, client: str) -> Request:
        """Return training of θ on new data, with a sample to remember, else FAACL's training."""
        self._notice_new_data([client])
        if client not in self.state.cold:
            return self._training(client)
        epochs = self.parameters.learn_epochs if self._has_clusters else self.parameters.init_epochs
        work = self._initial_training(client, epochs)
        settings = {**work.settings, keys.REMEMBERED: self.parameters.remembered}
        return Request(client, keys.LEARN, (), work.arrays, settings, work.phase)

    def _is_new(self, update: Update) -> bool:
        """Return whether an update is of new data; there may be newer ones by now."""
        return update.task.kind == keys.LEARN

    def _process_founders(self, updates: Sequence[Update]) -> Outcomes:
        """Found clusters for the first clients (cold start, Algorithm 7); later ones search."""
        if self._has_clusters:
            return self._learned(updates)
        founded = super()._process_founders(updates)
        for update in updates:
            cluster = founded[update.number].cluster
            self._remember(update.task.client, update.task.step, cluster)
        return founded

    @property
    def _has_clusters(self) -> bool:
        return bool(self.state.supported.partitions)

    def _learned(self, updates: Sequence[Update]) -> Outcomes:
        """Store the local models of clients with new data for the search."""
        outcomes = Outcomes()
        for update in updates:
            client = update.task.client
            self.state.local[client] = update.vector.copy()
            self.state.learned_at[client] = update.task.step
            outcomes[update.number] = Outcome(self.clusters.main(client), staleness=0, weight=0.0)
        return outcomes

    # Searches for the clusters of new data between two rounds, Algorithms 8 and 9.

    def _search(self, context: SelectionContext) -> list[Request] | None:
        """Return the evaluations of the present stage; None without a search."""
        state = self.state
        if context.greeting:
            return None
        while state.local:
            asked = self.scheduling.ask_first(
                context, self._has_untried_request, every=0, patience=ASKING_SECONDS
            )
            if asked is not None:
                return [self._work(client) for client in asked]
            self._advance()
        return None

    def _has_untried_request(self, client: str) -> bool:
        return client in self.state.requests and client not in self.state.tried

    # Requests.

    def _work(self, client: str) -> Request:
        """Return a client's request of this stage."""
        state, request = self.state, self.state.requests[client]
        settings: dict[str, float | str | list[int]] = {keys.MEMORY_STEPS: request.steps}
        if state.stage == LENDING:
            settings[COMPUTE_SCALE] = 0.0
            return Request(client, keys.LEND, models=(), settings=settings, phase=state.stage)
        if VALIDATION in request.clusters:
            settings[ON] = VALIDATION
        settings[COMPUTE_SCALE] = self._cost(client, request)
        rows = [request.rows(name) for name in request.sets]
        settings[keys.PAIRS] = [x for at, own in enumerate(rows) for row in own for x in (at, row)]
        clusters, clients = request.models()
        arrays = {
            numbered(keys.LOCAL, index): self.spec.pack(state.local[name])
            for index, name in enumerate(clients)
        }
        for index, remembered in enumerate(request.borrowed):
            arrays[numbered(keys.BORROWED, index)] = self._lent(remembered)
        return Request(client, keys.MATCH, tuple(clusters), arrays, settings, phase=state.stage)

    def _cost(self, client: str, request: ConceptRequest) -> float:
        """Return the cost of the evaluations as a share of a round's computation."""
        examples = self.progress.fleet.clients[client].num_examples
        passed = 0.0
        for name in request.sets:
            is_new = name == VALIDATION
            samples = validation_share(self) * examples if is_new else self.parameters.remembered
            passed += samples * len(request.rows(name))
        return passed / max(1, examples) * forward_cost(self.train_config, examples)

    def _lent(self, remembered: Remembered) -> ArrayRecord:
        name = numbered(keys.MEMORY, remembered.step)
        lent = self.state.lent[remembered.client]
        parts = {part: to_array(lent[f"{name}-{part}"]) for part in (keys.INPUTS, keys.LABELS)}
        return array_record(parts)

    def _process_search(self, answer: Answer) -> None:
        """Store losses or lent samples.

        Raises
        ------
        InvalidReplyError
            They are invalid, or arrive after the stage.
        """
        state, client = self.state, answer.task.client
        request = state.requests.get(client)
        if request is None or (answer.task.kind == keys.LEND) != (state.stage == LENDING):
            raise InvalidReplyError("it came after the search")
        self._drop_lost_steps(client, request, answer.numbers.keys())
        if state.stage == LENDING:
            state.lent[client] = dict(answer.numbers)
            return
        state.answers[client] = {
            name: losses_of(answer, len(request.rows(name)), name)
            for name in request.sets
            if name in answer.numbers
        }

    def _drop_lost_steps(self, client: str, request: ConceptRequest, there: Iterable[str]) -> None:
        """Drop the steps that a client no longer remembers, e.g. after a new installation."""
        known = set(there)
        for step in request.steps:
            name = numbered(keys.MEMORY, step)
            if name not in known and f"{name}-{keys.INPUTS}" not in known:
                text = "%s has lost its memory of step %d."
                log.warning(text, client, step, extra=about(client))
                self.state.memory.get(client, {}).pop(step, None)

    # From stage to stage.

    def _advance(self) -> None:
        """Evaluate a stage, and start the next."""
        state = self.state
        if state.stage == OWN:
            self._record_matches()
            self._begin_others()
        elif state.stage == LENDING:
            self._begin(OTHERS)
        elif state.stage == OTHERS:
            self._record_matches()
            self._assign_searching()
        else:
            state.tested = {client: self._own_samples(client) for client in state.local}
            self._begin(OWN)

    def _own_samples(self, client: str) -> list[Remembered]:
        """Return a client's own remembered samples, in order of time (Algorithm 8)."""
        heir = self.state.supported.heir
        known = sorted(self.state.memory.get(client, {}).items())
        return [Remembered(heir(cluster), client, step) for step, cluster in known]

    def _begin_others(self) -> None:
        """Draw a sample of each cluster for the clients without a match (Algorithm 9)."""
        state = self.state
        online = (client for client in state.memory if self.clusters.online.get(client))
        by_cluster = grouped(
            (own.cluster, own) for client in online for own in self._own_samples(client)
        )
        state.tested = {}
        for client in state.local:
            if client in state.joins:
                continue
            state.tested[client] = []
            for _, known in sorted(by_cluster.items()):
                if others := [r for r in known if r.client != client]:
                    drawn = others[int(self.rng.integers(len(others)))]
                    state.tested[client].append(drawn)
        self._begin(LENDING if self.parameters.borrow == "samples" else OTHERS)

    def _begin(self, stage: str) -> None:
        """Start a stage, and collect its requests."""
        state = self.state
        state.stage, state.tried, state.answers, state.requests = stage, {}, {}, {}
        for client, tested in state.tested.items():
            for remembered in tested:
                self._request_comparison(client, remembered)

    def _request_comparison(self, client: str, remembered: Remembered) -> None:
        """Add a client's comparison on a remembered sample to the requests."""
        requests, stage = self.state.requests, self.state.stage
        borrows = self.parameters.borrow == "samples"
        if stage in (LENDING, OTHERS) and (stage == LENDING or not borrows):
            holder = requests.setdefault(remembered.client, ConceptRequest())
            _append_once(holder.steps, remembered.step)
            if stage == OTHERS:
                holder.measure(numbered(keys.MEMORY, remembered.step), remembered.cluster, client)
        if stage == LENDING:
            return
        own = requests.setdefault(client, ConceptRequest())
        own.measure(VALIDATION, remembered.cluster, client)
        if stage == OWN:
            _append_once(own.steps, remembered.step)
            own.measure(numbered(keys.MEMORY, remembered.step), remembered.cluster, client)
        elif borrows and self._is_lent(remembered):
            _append_once(own.borrowed, remembered)
            name = numbered(keys.BORROWED, own.borrowed.index(remembered))
            own.measure(name, remembered.cluster, client)

    def _is_lent(self, remembered: Remembered) -> bool:
        lent, name = (
            self.state.lent.get(remembered.client, {}),
            numbered(keys.MEMORY, remembered.step),
        )
        return f"{name}-{keys.INPUTS}" in lent and f"{name}-{keys.LABELS}" in lent

    def _record_matches(self) -> None:
        """Record each client's first match, or a missing answer."""
        for client, tested in self.state.tested.items():
            matching = {remembered: self._is_match(client, remembered) for remembered in tested}
            found = next((one.cluster for one, fits in matching.items() if fits), None)
            if found is not None:
                self.state.joins[client] = found
            elif None in matching.values():
                self.state.unanswered[client] = True

    def _is_match(self, client: str, remembered: Remembered) -> bool | None:
        """Return whether new data match a remembered sample; None without an answer."""
        state, name = self.state, numbered(keys.MEMORY, remembered.step)
        if remembered.step not in state.memory[remembered.client]:
            return False  # The sample is lost.
        holder = remembered.client
        request = state.requests.get(client)
        if request is not None and remembered in request.borrowed:
            holder, name = client, numbered(keys.BORROWED, request.borrowed.index(remembered))
        new = self._losses(client, VALIDATION, remembered.cluster, client)
        old = self._losses(holder, name, remembered.cluster, client)
        if new is None or old is None:
            return None
        return matches(new, old, self.parameters.epsilon, self.parameters.alpha)

    def _losses(
        self, measured_by: str, name: str, cluster: int, client: str
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """Return the losses of a cluster's and a client's model; None if unknown."""
        request, answer = (
            self.state.requests.get(measured_by),
            self.state.answers.get(measured_by),
        )
        if request is None or answer is None or name not in answer:
            return None
        clusters, clients, losses = request.clusters[name], request.clients[name], answer[name]
        local = len(clusters) + clients.index(client)
        return losses[clusters.index(cluster)], losses[local]

    # After a search.

    def _assign_searching(self) -> None:
        """Assign clients to the clusters found; others found one (Algorithm 10).

        A client that lacks an answer learns and searches again.
        """
        state = self.state
        state.stage, state.tested, state.answers, state.lent = "", {}, {}, {}
        state.requests, state.tried = {}, {}
        for client, local in state.local.items():
            cluster = state.joins.get(client)
            if cluster is None and client in state.unanswered:
                text = "%s lacks an answer of its search: it will search again."
                log.warning(text, client, extra=about(client))
                continue
            if cluster is None:
                cluster = self.clusters.found(Model(local, 1), [client])
            else:
                self.clusters.assign(client, cluster)
            state.cold.pop(client, None)
            self._remember(client, state.learned_at[client], cluster)
        state.local, state.joins, state.unanswered, state.learned_at = {}, {}, {}, {}
        with_clients = [k for k in self.models if k != START and self.clusters.clients(k, False)]
        self._compare_all(with_clients)

    def _remember(self, client: str, step: int, cluster: int) -> None:
        self.state.memory.setdefault(client, {})[step] = cluster
