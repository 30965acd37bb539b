"""C-FAACL: FAACL for clients that meet one task after another.

Zhang, "Asymmetric Clustering in Federated Continual Learning" (C-FAACL), thesis, Waterloo 2024. At
first clusters are found as by FAACL. Whenever a client has new data (a step of data that change) it
trains a model of its own on them, and looks for the cluster that they belong to: among those of its
own former tasks first, then among all, comparing models on its new data and on a remembered sample
of that task (Algorithms 8 and 9, :mod:`raceme.strategies.concept_search`). If none fits, the data
are a new concept, and its model is that of a new cluster (Algorithm 10). Then clusters are trained,
compared and merged as in FAACL.

Each client remembers a sample of its validation data of every task, and the server which cluster
they belonged to. By default, as in the thesis, such a sample is lent to other clients, by way of
the server: it leaves its client. With ``borrow=losses`` only losses do.

Where the thesis is silent (our readings): a cluster without clients keeps its model, which is not
trained, and may be found again; clusters founded in a search are not searched by others of the same
search; what follows a search is Flat FAACL from the clusters as they are then. A client tests, and
is tested on, a former task with the model of the cluster that it had then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raceme.clustering.clusters import Clusters, Weights
from raceme.clustering.model import Model
from raceme.clustering.support import fewest_samples
from raceme.config.errors import UserError
from raceme.config.options import option
from raceme.protocol.messages import LEARN, LEND, LOSSES, MATCH, REMEMBERED, Vector
from raceme.server.dispatch import Dispatch, InRounds, Moment
from raceme.server.fleet import Client
from raceme.server.method import Applied, Method
from raceme.server.replies import Answer, Update
from raceme.server.work import Task, Work
from raceme.strategies.concept_search import ConceptSearch, SearchParameters, SearchState
from raceme.strategies.supported_models import (
    START,
    check_samples,
    found_each,
    greet,
    initial_training,
)
from raceme.strategies.supported_rounds import SupportRounds

_SEARCHING = (MATCH, LEND)


@dataclass(frozen=True)
class CFAACLParameters(SearchParameters):
    """Hyper-parameters of C-FAACL."""

    learn_epochs: int = option(
        20, "passes over the samples of a new task with which a client trains its own model", low=1
    )


@dataclass
class CFAACLState(SearchState):
    """What C-FAACL knows beside its models."""


class CFAACL(Method):
    """FAACL for one task after another: old concepts are recognised, new ones found (C-FAACL)."""

    parameters_type = CFAACLParameters
    state_type = CFAACLState
    validates = True
    parameters: CFAACLParameters
    state: CFAACLState
    dispatch: InRounds

    @property
    def asked_kinds(self) -> frozenset[str]:
        """Kinds of work that clients are asked for, beyond training and testing a model."""
        return frozenset({LEARN, LEND, LOSSES, MATCH})

    def policy(self) -> Dispatch:
        """Work in rounds; who supports other clusters trains their models after its own."""
        self.search = ConceptSearch(self, self._place)
        self.rounds = SupportRounds(self)
        return self.rounds.policy()

    def check(self, clients: int) -> None:
        """Raise UserError if clients are to remember too few samples for any test to be passed."""
        remembered, alpha = self.parameters.remembered, self.parameters.alpha
        if remembered < (needed := fewest_samples(alpha)):
            raise UserError(
                f"c-faacl.remembered is {remembered}, and a test at level {alpha:g} needs {needed} "
                "samples: no task would ever be recognised. Take more, or a larger c-faacl.alpha."
            )

    def check_validation(self, samples: int) -> None:
        """Raise UserError if a client keeps too few samples for any test to be passed."""
        check_samples(samples, self.parameters.alpha)

    def initialize(self, vector: Vector) -> None:
        """Begin with θ, which serves everybody until there are clusters."""
        self.clusters = Clusters({START: Model(vector)})
        self.state = CFAACLState(vector.copy())

    def add_client(self, client: Client) -> None:
        """Take a client in; one that is new has to train θ first."""
        is_new = client.client_id not in self.clusters.members
        super().add_client(client)
        if is_new:
            greet(self, self.state, client, self.parameters.alpha)

    def serving(self, client: str, step: int) -> Weights:
        """Return the cluster that a client's data of a step belonged to, or what it has become."""
        known = self.state.memory.get(client, {})
        cluster = self.state.supported.heir(known[step]) if step in known else None
        if cluster is None or cluster not in self.models:
            return self.placement(client)
        return {cluster: 1.0}

    # Before a round: searches, then Cluster Support and Cluster Merge.

    def next_work(self, moment: Moment) -> Iterable[Work]:
        """Find out where new data belong, have clusters compared, then let participants train."""
        asked = self.search.ask(moment)
        if asked is None:
            asked = self.rounds.compare(moment)
        if asked is None and not self.dispatch.state.running:
            self._notice_new_data(self.state.memory)
        return super().next_work(moment) if asked is None else asked

    def _notice_new_data(self, clients: Iterable[str]) -> None:
        """Let clients whose data have moved on train a model of their own next."""
        for client in clients:
            known = self.state.memory.get(client)
            if known is not None and (self.step_of(client) or 0) not in known:
                self.state.cold[client] = True

    def on_dispatch(self, task: Task) -> None:
        """Note who trains what, and who was asked."""
        if task.kind in _SEARCHING:
            self.search.sent(task)
        elif task.kind != LOSSES:
            self.rounds.sent(task)

    def on_answer(self, answer: Answer) -> None:
        """Take losses, or lent samples, in."""
        if answer.task.kind in _SEARCHING:
            self.search.take(answer)
        else:
            self.rounds.take(answer)

    # A round.

    def work_for(self, client: str) -> Work:
        """Let a client with new data train θ on them and remember a sample; others as in FAACL."""
        self._notice_new_data([client])
        if client not in self.state.cold:
            return self.rounds.train(client)
        epochs = self.parameters.learn_epochs if self._has_clusters else self.parameters.init_epochs
        work = initial_training(self, client, self.state.initial, epochs)
        settings = {**work.settings, REMEMBERED: self.parameters.remembered}
        return Work(client, LEARN, (), work.arrays, settings, work.phase)

    def aggregate(self, updates: Sequence[Update]) -> list[Applied]:
        """Make clusters of the first clients; let later ones search; average the others."""
        # Data may have moved on since: what a client was asked to do counts, not what it is now.
        new = [update for update in updates if update.task.kind == LEARN]
        others = [update for update in updates if update.task.kind != LEARN]
        averaged = self.rounds.aggregate(others)
        learned = self._learned(new) if self._has_clusters else self._found(new)
        done = dict(zip(map(id, [*new, *others]), [*learned, *averaged], strict=True))
        return [done[id(update)] for update in updates]

    @property
    def _has_clusters(self) -> bool:
        return bool(self.state.supported.partitions)

    def _found(self, updates: Sequence[Update]) -> list[Applied]:
        """Make a cluster of each of the first clients (the cold start, Algorithm 7)."""
        founded = found_each(self, self.state, updates)
        self.rounds.add([applied.cluster for applied in founded])
        for update, applied in zip(updates, founded, strict=True):
            self._remember(update.task.client, update.task.step, applied.cluster)
        return founded

    def _learned(self, updates: Sequence[Update]) -> list[Applied]:
        """Keep the models of clients with new data: they search with them."""
        for update in updates:
            self.state.local[update.task.client] = update.vector.copy()
            self.state.learned_at[update.task.client] = update.task.step
        places = [self.clusters.main(update.task.client) for update in updates]
        return [Applied(cluster, staleness=0, weight=0.0) for cluster in places]

    # After a search.

    def _place(self) -> None:
        """Let clients join the clusters that they have found; others found one (Algorithm 10)."""
        state = self.state
        for client, local in state.local.items():
            cluster = state.joins.get(client)
            if cluster is None:
                cluster = self.clusters.found(Model(local, 1), [client])
            else:
                self.clusters.assign(client, cluster)
            state.cold.pop(client, None)
            self._remember(client, state.learned_at[client], cluster)
        state.local, state.joins, state.learned_at = {}, {}, {}
        with_clients = [k for k in self.models if k != START and self.clusters.clients(k, False)]
        self.rounds.compare_all(with_clients)

    def _remember(self, client: str, step: int, cluster: int) -> None:
        self.state.memory.setdefault(client, {})[step] = cluster
