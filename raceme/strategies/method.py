"""What makes a method: the questions that a loop over updates or rounds asks it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
from flwr.app import ArrayRecord

from raceme.messages import Vector
from raceme.strategies.fleet import Client
from raceme.strategies.model import Model
from raceme.strategies.replies import Task


class Method(ABC):
    """An algorithm without its loop.

    A method says which model a client gets next (`cluster_of`, `models`), and what to do with one
    update (`AsyncStrategy.on_update`) or with those of a round (`Rounds.aggregate`). The other
    functions are called so that it can keep count, and may be left as they are.
    """

    @abstractmethod
    def initialize(self, vector: Vector) -> None:
        """Set `self.state`, a dataclass, up from the initial model."""

    @abstractmethod
    def cluster_of(self, client: str) -> int:
        """Return the cluster whose model a client is given next, and is tested with."""

    def models_for(self, client: str) -> tuple[int, ...]:
        """Return the clusters whose models a client is sent; of several, it picks one to train."""
        return (self.cluster_of(client),)

    def attachments(self, client: str) -> Mapping[str, ArrayRecord]:
        """Return further arrays that travel with a client's model, by the name of their record."""
        return {}

    @property
    @abstractmethod
    def models(self) -> Mapping[int, Model]:
        """The models by cluster."""

    def add_client(self, client: Client) -> None:  # noqa: B027
        """Take in a client that was greeted, for the first time or again."""

    def remove_client(self, client: str) -> None:  # noqa: B027
        """Note that a client went offline."""

    def on_dispatch(self, task: Task) -> None:  # noqa: B027
        """Note that a client is given a task."""

    def on_close(self, task: Task) -> None:  # noqa: B027
        """Note that a task is over, whatever came of it."""

    def train_config(self, client: str) -> Mapping[str, str | int | float | bool]:
        """Return what a client's training message says beyond the run's own settings."""
        return {}

    def similarity(self) -> tuple[list[str], np.ndarray] | None:
        """Return clients and the matrix of their similarities (NaN: unknown), if there is one."""
        return None
