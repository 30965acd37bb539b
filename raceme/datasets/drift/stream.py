"""Continual streams of two concepts: at every step of its data a client meets one of them again.

C-FAACL's experiments (Zhang, Waterloo 2024): ten time steps, each with new data, of the two groups'
data in one of the scenarios S1, S2, A1 and A2. In the sequential setting all clients have the same
concept at a step; in the multi-task setting each has one of the two. The order is not told: here
it is drawn, so that both occur.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.config.options import option
from raceme.datasets.drift.base import Drift, DriftOptions
from raceme.datasets.drift.schedule import Schedule
from raceme.datasets.scenario import Scenario, ScenarioOptions
from raceme.datasets.source import ClientData, Indices, Labels

_CONCEPTS = 2
_TRAINING = 2
"""Fewest training samples of a step: one may be kept to compare models on."""


@dataclass(frozen=True)
class StreamOptions(ScenarioOptions, DriftOptions):
    """Options of scenario-stream."""

    stream_steps: int = option(10, "steps of new data", low=2)
    stream_mode: str = option(
        "sequential",
        "who has which concept: sequential, all clients the same at a step, or multi-task, each "
        "one of its own",
        among=("sequential", "multi-task"),
    )


class ScenarioStream(Drift):
    """Each step brings new samples of one of a scenario's two concepts (C-FAACL).

    A client's samples, for training and for testing, are divided evenly over the steps; where a
    concept has classes of its own (S1), those of its classes over the steps that have the concept.
    No sample is met twice, and all are met but where a concept has little data (A2). After the last
    step the stream begins again, with the same samples.
    """

    options_type = StreamOptions

    @staticmethod
    def default_schedule(config: RunConfig) -> str:
        """Return an equal part of the run for each step; of its rounds, if these limit it."""
        steps = config.read(StreamOptions).stream_steps
        in_rounds = config.max_rounds and config.max_updates is None
        total = config.max_rounds if in_rounds else config.planned_updates
        unit = "rounds" if in_rounds else "updates"
        if total < steps:
            return f"every {unit[:-1]}"
        return ", ".join(f"{total * step // steps} {unit}" for step in range(1, steps))

    @staticmethod
    def check_schedule(config: RunConfig, schedule: Schedule) -> None:
        """Raise UserError if the run is known to end before the stream's last step."""
        steps = config.read(StreamOptions).stream_steps
        ends = {
            "seconds": config.max_time,
            "rounds": config.max_rounds,
            "updates": 0 if config.max_rounds else config.planned_updates,
        }
        end = ends.get(schedule.unit, 0)
        if not end:
            return
        # What counts at its end is over then; of time, the last moment is not reached.
        last = end - (1 if schedule.unit != "seconds" else 1e-6)
        count = int(last)
        met = 1 + schedule.step(last, count, count, count)
        if met < steps:
            raise UserError(
                f"The stream has {steps} steps, and drift-at lets this run of {end:g} "
                f"{schedule.unit} meet {met} of them: take fewer stream-steps, a longer run or "
                "another drift-at."
            )

    def check(self) -> None:
        """Raise UserError if there are not two concepts, or too few samples for the steps."""
        self.needs_labels()
        config, dataset = self.dealt.config, self.dealt.dataset
        if self._scenario.groups < _CONCEPTS:
            raise UserError("scenario s0 has one concept only: take s1, s2, a1 or a2.")
        if dataset.users is None and self.dealt.partition.groups[0] is not None:
            raise UserError(
                f"drift scenario-stream makes the two concepts itself, and partition "
                f"{config.partition} makes groups: take partition iid or dirichlet."
            )
        self._scenario.check(dataset, config.dataset)
        for client in self.dealt.present:
            concepts = self._concepts(client)
            for part, least, kind in ((0, _TRAINING, "training"), (1, 1, "test")):
                own = self.dealt.indices(client)[part]
                for concept, steps, samples in self._shares(own, concepts):
                    if self._kept(len(samples) // len(steps), concept) < least:
                        raise UserError(
                            f"Client {client} has {len(samples)} {kind} samples for "
                            f"{len(steps)} steps of {self._named(concept)}, too few for {least} at "
                            "each: take fewer clients or stream-steps, or a larger "
                            "scenario-little."
                        )

    def data(self, client: int, step: int) -> ClientData:
        """Return the samples of a step, as its concept shows them."""
        concepts = self._concepts(client)
        position = step % len(concepts)
        concept = int(concepts[position])
        train, test = (
            self._of_step(client, own, concepts, position, part)
            for part, own in zip(("train", "test"), self.dealt.indices(client), strict=True)
        )
        return ClientData(
            self._scenario.inputs(self.dealt.dataset, train, concept),
            self._labels(train, concept),
            self._scenario.inputs(self.dealt.dataset, test, concept),
            self._labels(test, concept),
            group=concept,
        )

    def fewest(self, client: int) -> int:
        """Return the fewest training samples of a client at any step."""
        own, _ = self.dealt.indices(client)
        shares = self._shares(own, self._concepts(client))
        return min(self._kept(len(part) // len(steps), concept) for concept, steps, part in shares)

    def groups(self, step: int) -> tuple[int | None, ...]:
        """Return the concept of every client."""
        steps = self.options.stream_steps
        return tuple(int(self._concepts(c)[step % steps]) for c in range(self.dealt.clients))

    @cached_property
    def _scenario(self) -> Scenario:
        own = self.options.drift_seed
        return Scenario(self.options, self.dealt.config.seed if own is None else own)

    def _concepts(self, client: int) -> Indices:
        """Draw the concept of each of a client's steps, shape (steps,); both occur."""
        alike = self.options.stream_mode == "sequential"
        rng = self.rng("concepts of steps", 0 if alike else 1 + client)
        while True:
            drawn: Indices = rng.integers(_CONCEPTS, size=self.options.stream_steps)
            if len(np.unique(drawn)) == _CONCEPTS:
                return drawn

    def _shares(self, own: Indices, concepts: Indices) -> Iterator[tuple[int, Indices, Indices]]:
        """Yield the concepts, and which steps divide which samples with each."""
        dataset = self.dealt.dataset
        for concept in range(_CONCEPTS):
            if not self._scenario.divides_classes:
                yield concept, np.arange(len(concepts)), own
                continue
            kinds = self._scenario.classes(np.arange(dataset.num_classes), concept)
            steps = np.flatnonzero(concepts == concept)
            yield concept, steps, own[np.isin(dataset.y[own], kinds)]

    def _of_step(
        self, client: int, own: Indices, concepts: Indices, position: int, part: str
    ) -> Indices:
        """Return which of a client's samples are those of a step, ascending."""
        concept = int(concepts[position])
        _, steps, samples = list(self._shares(own, concepts))[concept]
        order = self.rng(f"samples of steps: {part}", client).permutation(samples)
        share = np.array_split(order, len(steps))[int(np.searchsorted(steps, position))]
        return np.sort(share[: self._kept(len(share), concept)])

    def _kept(self, count: int, concept: int) -> int:
        """Return how many of a step's samples there are, if its concept has little data."""
        return round(count * self._scenario.size(concept))

    def _labels(self, samples: Indices, concept: int) -> Labels:
        dataset = self.dealt.dataset
        return self._scenario.labels(dataset.y[samples], concept, dataset.num_classes)

    def _named(self, concept: int) -> str:
        return f"scenario {self.options.scenario}, concept {concept}"
