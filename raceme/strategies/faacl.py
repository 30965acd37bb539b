"""FAACL: clusters that may be supported by clusters which they do not support.

Zhang, "Asymmetric Clustering in Federated Continual Learning" (FAACL), thesis, Waterloo 2024. Every
client trains a random θ and is a cluster of its own. Then clusters are trained, compared and
merged, again and again, until nothing changes: C2 supports C1 if on every client of C1 the model of
C2 is no worse by more than ε, by Wilcoxon's test on the losses of its validation samples; two that
support each other are merged; and a model is trained by the clients of its cluster and of those
that support it. Hierarchical FAACL does this in partitions, first of one client each, which are
joined in pairs until one is left: far fewer models are compared. From then on clusters stay as they
are, and are trained.

Where the thesis is silent (our readings): α is 0.05; support is found out anew each time; a merged
cluster is compared again in the next pass only; "nothing changes" means the same clients together,
whoever supports whom; a step of training is one pass of mini-batches; the last partition, of all
clients, is worked on too. A client that comes later trains θ and is a partition of its own, which
is joined with the others. These rounds are in :mod:`raceme.strategies.supported_rounds`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raceme.clustering.clusters import Clusters
from raceme.clustering.model import Model
from raceme.protocol.messages import LOSSES, Vector
from raceme.server.dispatch import Dispatch, Moment
from raceme.server.fleet import Client
from raceme.server.method import Applied, Method
from raceme.server.replies import Answer, Update
from raceme.server.work import Task, Work
from raceme.strategies.supported_models import (
    START,
    check_samples,
    found_each,
    greet,
    initial_training,
)
from raceme.strategies.supported_rounds import (
    SupportRounds,
    SupportRoundsParameters,
    SupportRoundsState,
)


@dataclass(frozen=True)
class FAACLParameters(SupportRoundsParameters):
    """Hyper-parameters of FAACL."""


@dataclass
class FAACLState(SupportRoundsState):
    """What FAACL knows beside its models."""


class FAACL(Method):
    """Clusters found by statistical tests, with one-sided support between them (FAACL)."""

    parameters_type = FAACLParameters
    state_type = FAACLState
    validates = True
    parameters: FAACLParameters
    state: FAACLState

    @property
    def asked_kinds(self) -> frozenset[str]:
        """Kinds of work that clients are asked for, beyond training and testing a model."""
        return frozenset({LOSSES})

    def policy(self) -> Dispatch:
        """Work in rounds; who supports other clusters trains their models after its own."""
        self.rounds = SupportRounds(self)
        return self.rounds.policy()

    def check_validation(self, samples: int) -> None:
        """Raise UserError if a client keeps too few samples for any test to be passed."""
        check_samples(samples, self.parameters.alpha)

    def initialize(self, vector: Vector) -> None:
        """Begin with θ, which serves everybody until there are clusters."""
        self.clusters = Clusters({START: Model(vector)})
        self.state = FAACLState(vector.copy())

    def add_client(self, client: Client) -> None:
        """Take a client in; one that is new has to train θ first."""
        is_new = client.client_id not in self.clusters.members
        super().add_client(client)
        if is_new:
            greet(self, self.state, client, self.parameters.alpha)

    def next_work(self, moment: Moment) -> Iterable[Work]:
        """Have clusters compared first, if that is due; then let participants train."""
        asked = self.rounds.compare(moment)
        return super().next_work(moment) if asked is None else asked

    def on_answer(self, answer: Answer) -> None:
        """Take losses in."""
        self.rounds.take(answer)

    def work_for(self, client: str) -> Work:
        """Let a new client train θ, Algorithm 1, and others the next of their models."""
        if client in self.state.cold:
            epochs = self.parameters.init_epochs
            return initial_training(self, client, self.state.initial, epochs)
        return self.rounds.train(client)

    def on_dispatch(self, task: Task) -> None:
        """Note who trains what."""
        if task.kind != LOSSES:
            self.rounds.sent(task)

    def aggregate(self, updates: Sequence[Update]) -> list[Applied]:
        """Make clusters of new clients; average what was trained from each model."""
        cold = [update for update in updates if update.task.client in self.state.cold]
        others = [update for update in updates if update.task.client not in self.state.cold]
        averaged = self.rounds.aggregate(others)
        founded = found_each(self, self.state, cold)
        self.rounds.add([applied.cluster for applied in founded])
        done = dict(zip(map(id, [*cold, *others]), [*founded, *averaged], strict=True))
        return [done[id(update)] for update in updates]
