"""Concepts that come to one client after another: the same inputs with some labels exchanged.

After the label-swapping streams of Jothimurugesan et al., "Federated Learning under Distributed
Concept Drift" (FedDrift), AISTATS 2023: a client's data of each step follow one concept, the change
comes to clients at different steps, and with more than two concepts different new ones come at the
same time. Which client changes when is drawn: our reading, as are the labels that are exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.config.options import option
from raceme.datasets.drift.base import Drift, DriftOptions
from raceme.datasets.source import ClientData


@dataclass(frozen=True)
class ConceptsOptions(DriftOptions):
    """Options of concepts."""

    concepts: int = option(2, "number of concepts", low=2)
    concept_steps: int = option(10, "steps over which the changes are spread", low=2)
    concept_samples: str = option(
        "new",
        "training samples of a step: new, each step a part of the client's, or the same at every "
        "step",
        among=("new", "same"),
    )


class Concepts(Drift):
    """Clients go from concept to concept, at steps of their own; a concept exchanges two labels.

    Concept 0 has the labels as they are; concept k exchanges labels 2k − 1 and 2k. All clients
    begin with concept 0 and meet every other once: client i first 1 + i mod (K − 1), then the
    following ones in turn. The K − 1 steps at which it changes are drawn, without repetition, from
    1 to ``concept-steps`` − 1.
    """

    options_type = ConceptsOptions

    @staticmethod
    def default_schedule(config: RunConfig) -> str:
        """Return a tenth of the run for each step."""
        return f"every {max(1, config.planned_updates // 10)} updates"

    def check(self) -> None:
        """Raise UserError if there are too few labels, steps or samples."""
        count, steps = self.options.concepts, self.options.concept_steps
        classes = self.dealt.dataset.num_classes
        if 2 * count - 1 > classes:
            raise UserError(
                f"{count} concepts exchange the labels 1 to {2 * count - 2}, and there are labels "
                f"0 to {classes - 1}: take fewer concepts."
            )
        if count > steps:
            raise UserError(
                f"A client meets {count} concepts at {count} different steps, and concept-steps is "
                f"{steps}: take fewer concepts or more concept-steps."
            )
        if self.options.concept_samples == "new":
            fewest, client = min((len(self.dealt.indices(c)[0]), c) for c in self.dealt.present)
            if fewest < steps:
                raise UserError(
                    f"Client {client} has {fewest} training samples, too few for a new one at each "
                    f"of {steps} steps: take concept-samples same, fewer clients or concept-steps."
                )

    def data(self, client: int, step: int) -> ClientData:
        """Return the samples of a step with the labels of its concept."""
        data = self.dealt.data(client)
        if self.options.concept_samples == "new":
            steps = self.options.concept_steps
            order = self.rng("samples of steps", client).permutation(len(data.y_train))
            own = np.sort(np.array_split(order, steps)[step % steps])
            data = replace(data, x_train=data.x_train[own], y_train=data.y_train[own])
        concept = self.concept(client, step)
        return replace(
            data,
            y_train=exchanged(data.y_train, concept),
            y_test=exchanged(data.y_test, concept),
            group=concept,
        )

    def groups(self, step: int) -> tuple[int | None, ...]:
        """Return the concept of every client."""
        return tuple(self.concept(client, step) for client in range(self.dealt.clients))

    def concept(self, client: int, step: int) -> int:
        """Return the concept of a client's data at a step, from 0."""
        others = self.options.concepts - 1
        rng = self.rng("steps of change", client)
        moments = rng.choice(np.arange(1, self.options.concept_steps), others, replace=False)
        changes = int(np.sum(moments <= step))
        return 1 + (client + changes - 1) % others if changes else 0


def exchanged(y: NDArray[np.int64], concept: int) -> NDArray[np.int64]:
    """Return labels with 2k − 1 and 2k exchanged, for concept k; as they are for concept 0."""
    if concept == 0:
        return y
    one, other = 2 * concept - 1, 2 * concept
    return np.where(y == one, other, np.where(y == other, one, y))
