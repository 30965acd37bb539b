"""The samples of all clients as they were dealt out, before anything changes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.datasets.partition import Partition
from raceme.datasets.reserve import reserved, wanted
from raceme.datasets.scenario import Scenario, scenario_of
from raceme.datasets.skew import is_skewed, skew
from raceme.datasets.source import ClientData, Dataset, Indices, Labels, generator


@dataclass(frozen=True, eq=False)
class Dealt:
    """Who has which samples, and how a client sees them.

    Attributes
    ----------
    config : RunConfig
        The run's; its number of clients is known.
    dataset : Dataset
        All samples that were loaded.
    partition : Partition
        Who has which of them.
    only : int or None
        The one client whose data were loaded, on a device that has no others; None for all.
    """

    config: RunConfig
    dataset: Dataset
    partition: Partition
    only: int | None = None

    @property
    def clients(self) -> int:
        """Number of clients of the run."""
        return self.config.num_clients

    @property
    def present(self) -> Iterable[int]:
        """The clients whose data were loaded."""
        return range(self.clients) if self.only is None else (self.only,)

    @property
    def skewed(self) -> bool:
        """Whether a client's group decides how it sees samples, not which samples it has."""
        # Clients that the data come with have their own features; a partition's are not theirs.
        if self.dataset.users is not None:
            return False
        return is_skewed(self.config) or (
            self._scenario is not None and self._scenario.changes_samples
        )

    @cached_property
    def _scenario(self) -> Scenario | None:
        """What groups differ in, if the partition makes a scenario."""
        return scenario_of(self.config)

    def group(self, client: int) -> int | None:
        """Return the true group of a client, None where there is none."""
        return self.partition.groups[self._position(client)]

    def indices(self, client: int) -> tuple[Indices, Indices]:
        """Return the training and the test samples of a client: at least one of each.

        What the server keeps for itself is not among them.
        """
        train, test = self._divided(client)
        return train, test[~np.isin(test, self._kept)] if len(self._kept) else test

    @cached_property
    def _kept(self) -> Indices:
        """All samples that the server keeps for itself."""
        return np.unique(np.concatenate([np.empty(0, np.int64), *self.reserve.values()]))

    @cached_property
    def reserve(self) -> dict[int, Indices]:
        """Test samples of each distribution that the server has, and no client (``proxy``).

        A distribution is what the clients of a group have. Where groups only see the same samples
        in different ways, the samples are the same for all.

        Raises
        ------
        UserError
            There are no groups, or not samples enough.
        """
        text = self.config.proxy
        if wanted(text) is None:
            return {}
        pools = self.pools(lambda client: self._divided(client)[1], spares_first=True)
        rng = generator(self.config.seed, "proxy")
        return reserved(pools, self.dataset.y, text, rng, alike=self.skewed)

    def pools(self, of: Callable[[int], Indices], spares_first: bool = False) -> dict[int, Indices]:
        """Return the samples of each distribution: those of its group's clients.

        Parameters
        ----------
        of : Callable
            Returns the samples of a client.
        spares_first : bool
            Leave the first sample of each client out.

        Raises
        ------
        UserError
            There are no groups.
        """
        groups = self.partition.groups
        numbers = sorted({group for group in groups if group is not None})
        if None in groups or self.only is not None:
            raise UserError(
                "proxy and pretrain take samples of each group's distribution, and these clients "
                "have no groups: take a partition with groups, or for proxy a folder of .npz files."
            )
        start = int(spares_first)
        own = {client: of(client)[start:] for client in range(self.clients)}
        return {
            number: np.concatenate([own[c] for c in own if self.skewed or groups[c] == number])
            for number in numbers
        }

    def _divided(self, client: int) -> tuple[Indices, Indices]:
        """Return the training and the test samples of a client as they were dealt."""
        position = self._position(client)
        own, config = self.partition.indices[position], self.config
        if self.dataset.test_users is not None:
            train, test = own, self.dataset.test_users[position]
        else:
            train, test = _divided(
                own, config.test_fraction, config.seed, "train and test", position
            )
        if config.validation_fraction:
            if len(train) < 2:
                raise UserError(
                    f"Client {client} has a single training sample: with validation-fraction every "
                    "client needs two."
                )
            # What is chosen by these has not seen the test samples.
            share = config.validation_fraction
            train, test = _divided(train, share, config.seed, "validation", position)
        return train, test

    def inputs(
        self, samples: Indices, group: int | None, client: int, part: str
    ) -> NDArray[np.float32]:
        """Return samples as a client of a group sees them.

        Parameters
        ----------
        samples : Indices
            Which ones.
        group : int or None
            The group.
        client : int
            Whose noise it is, where the group adds noise.
        part : str
            ``"train"`` or ``"test"``: their noise must differ.
        """
        if self._scenario is not None and self.skewed and group is not None:
            return self._scenario.inputs(self.dataset, samples, group)
        inputs = self.dataset.inputs(samples)
        if not self.skewed:
            return inputs
        return skew(inputs, self.config, group, client, part, self.dataset.blank)

    def labels(self, samples: Indices, group: int | None) -> Labels:
        """Return the labels of samples as a client of a group gives them, shape (n,)."""
        labels = self.dataset.y[samples]
        if self._scenario is None or not self.skewed or group is None:
            return labels
        return self._scenario.labels(labels, group, self.dataset.num_classes)

    def data(self, client: int) -> ClientData:
        """Return the samples that were dealt out to a client."""
        return self._data(client, *self.indices(client))

    def data_where(self, client: int, wanted: NDArray[np.bool_]) -> ClientData:
        """Return those of a client's samples that are wanted, at least two.

        A lone part, for training or for testing, lends the other one a sample.

        Parameters
        ----------
        client : int
            The client.
        wanted : NDArray[np.bool_]
            Whether each sample of the dataset is wanted, shape (N,).
        """
        train, test = (own[wanted[own]] for own in self.indices(client))
        if len(test) == 0:
            train, test = train[:-1], train[-1:]
        elif len(train) == 0:
            train, test = test[:-1], test[-1:]
        return self._data(client, train, test)

    def _data(self, client: int, train: Indices, test: Indices) -> ClientData:
        group = self.group(client)
        return ClientData(
            self.inputs(train, group, client, "train"),
            self.labels(train, group),
            self.inputs(test, group, client, "test"),
            self.labels(test, group),
            group,
        )

    def _position(self, client: int) -> int:
        return client if self.only is None else 0


def _divided(
    own: Indices, share: float, seed: int, purpose: str, position: int
) -> tuple[Indices, Indices]:
    """Divide samples at random into those that are kept, and a share: at least one of each."""
    shuffled = generator(seed, purpose, position).permutation(own)
    count = int(np.clip(round(share * len(own)), 1, len(own) - 1))
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])
