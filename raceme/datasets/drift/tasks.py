"""Sequences of tasks, for continual learning: at every step a client meets other labels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.config.options import option
from raceme.datasets.drift.base import Drift, DriftOptions
from raceme.datasets.source import ClientData, Indices

_MOST = 5
"""Tasks of a sequence, if no number is given and the clients have labels enough."""
_FEWEST = 2
_SAMPLES = 2
"""A task needs a sample to train with and one to test with."""


@dataclass(frozen=True)
class TasksOptions(DriftOptions):
    """Options of tasks."""

    tasks_count: int | None = option(
        None, "length of the sequence (auto: 5, or as many as every client's labels)", low=2
    )
    tasks_order: str = option(
        "own",
        "whether every client has its own order of tasks or all the same",
        among=("own", "same"),
    )


class Tasks(Drift):
    """A sequence of tasks per client: its labels are split into tasks, each step is the next one.

    One random order of all labels decides, for all clients alike, which of a client's labels go
    into a task together; so clients with the same labels have the same tasks. After the last task
    the first comes again.
    """

    options_type = TasksOptions

    @staticmethod
    def default_schedule(config: RunConfig) -> str:
        """Return the same number of updates for each task; for each of five, if none is given."""
        count = config.read(TasksOptions).tasks_count or _MOST
        return f"every {max(1, config.planned_updates // count)} updates"

    def check(self) -> None:
        """Raise UserError if there are no classes, or a client has not enough of them."""
        self.needs_labels()
        wanted, (fewest, client) = self._number, self._fewest_labels
        if fewest < wanted:
            raise UserError(
                f"drift tasks needs {wanted} labels of at least {_SAMPLES} samples at every "
                f"client, a label for each task, and client {client} has {fewest}: take "
                "partition iid or dirichlet, or fewer tasks-count."
            )

    def data(self, client: int, step: int) -> ClientData:
        """Return the client's samples of the labels of its task."""
        count = self._number
        position = step % count
        if self.options.tasks_order == "own":
            position = int(self.rng("order of tasks", client).permutation(count)[position])
        tasks = np.array_split(self._labels(client), count)
        return self.dealt.data_where(client, np.isin(self.dealt.dataset.y, tasks[position]))

    def fewest(self, client: int) -> int:
        """Return the fewest training samples of a client at any step."""
        return min(len(self.data(client, step).y_train) for step in range(self._number))

    def _labels(self, client: int) -> Indices:
        """Return the labels of which a client has samples enough, in the order common to all."""
        own = np.concatenate(self.dealt.indices(client))
        counts = np.bincount(self.dealt.dataset.y[own], minlength=self.dealt.dataset.num_classes)
        order = self.rng("order of labels").permutation(self.dealt.dataset.num_classes)
        enough: Indices = order[counts[order] >= _SAMPLES]
        return enough

    @cached_property
    def _number(self) -> int:
        """The number of tasks, the same for every client."""
        if self.options.tasks_count is not None:
            return int(self.options.tasks_count)
        fewest, _ = self._fewest_labels
        return max(_FEWEST, min(_MOST, fewest))

    @cached_property
    def _fewest_labels(self) -> tuple[int, int]:
        """The fewest labels that a client has, and the client."""
        return min((len(self._labels(client)), client) for client in self.dealt.present)
