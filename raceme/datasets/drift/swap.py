"""Clients that exchange data.

"Swap all" and "swap part" of Duan et al., "Flexible Clustered Federated Learning for Client-Level
Data Distribution Shift" (FlexCFL), TPDS 2022. At every step all clients are paired at random, and
each pair exchanges with the same chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.config.options import option
from raceme.datasets.dealt import Dealt
from raceme.datasets.drift.base import Drift, DriftOptions, Evolution
from raceme.datasets.source import ClientData, Indices


@dataclass(frozen=True)
class SwapOptions(DriftOptions):
    """Options of the two exchanges."""

    swap_chance: float = option(0.05, "chance that a pair of clients exchanges", above=0, high=1)


class Swap(Drift):
    """What both exchanges have in common: the pairs."""

    options_type = SwapOptions
    needs_others = True

    @staticmethod
    def default_schedule(config: RunConfig) -> str:
        """Return one step for as many updates as there are clients, the size of a round."""
        return f"every {config.num_clients} updates"

    def check(self) -> None:
        """Raise UserError if there are no two clients."""
        if self.dealt.clients < 2:
            raise UserError("Clients that exchange data are at least 2: take more clients.")

    def pairs(self, clients: int, step: int) -> Indices:
        """Return the pairs that exchange at a step, shape (pairs, 2)."""
        rng = self.rng(f"pairs {step}")
        pairs = rng.permutation(clients)[: clients // 2 * 2].reshape(-1, 2)
        chosen: Indices = pairs[rng.random(len(pairs)) < self.options.swap_chance]
        return chosen


class SwapAll(Swap):
    """Pairs of clients exchange all their data, training and test samples, and their group."""

    def data(self, client: int, step: int) -> ClientData:
        """Return what was dealt out to the client whose data it has now."""
        return self.dealt.data(int(self._origins.at(step)[client]))

    def groups(self, step: int) -> tuple[int | None, ...]:
        """Return the groups, which move with the data."""
        return tuple(self.dealt.group(origin) for origin in self._origins.at(step).tolist())

    @cached_property
    def _origins(self) -> Evolution[Indices]:
        """Whose data each client has, shape (clients,)."""
        return Evolution(np.arange(self.dealt.clients), self._exchanged)

    def _exchanged(self, origins: Indices, step: int) -> Indices:
        first, second = self.pairs(len(origins), step).T
        after = origins.copy()
        after[first], after[second] = origins[second], origins[first]
        return after


@dataclass(frozen=True, eq=False)
class _Held:
    """Who has whose samples of which label.

    Attributes
    ----------
    holder : Indices
        Shape (clients, labels): who has the samples of a label that were dealt out to a client.
    train, test : Indices
        Shape (clients, labels): how many training and test samples each client has now.
    """

    holder: Indices
    train: Indices
    test: Indices


class SwapPart(Swap):
    """Pairs exchange one label that only the one has for one label that only the other has."""

    def check(self) -> None:
        """Raise UserError if no two clients have labels of their own."""
        super().check()
        self.needs_labels()
        has = self._held.at(0)
        owned = {tuple(row) for row in ((has.train + has.test) > 0).tolist()}
        if not any(
            any(a and not b for a, b in zip(one, other, strict=True))
            and any(b and not a for a, b in zip(one, other, strict=True))
            for one in owned
            for other in owned
        ):
            raise UserError(
                "drift swap-part exchanges labels that only one of two clients has, and no two "
                "clients have such: take partition classes or label-groups, or swap-all."
            )

    def data(self, client: int, step: int) -> ClientData:
        """Return what the client kept, and what it got from each of the others."""
        holder = self._held.at(step).holder
        mine = holder == client
        origins = np.flatnonzero(mine.any(axis=1))
        if mine[client].all() and origins.tolist() == [client]:
            return self.dealt.data(client)
        parts = [_of_labels(self.dealt.data(origin), mine[origin]) for origin in origins.tolist()]
        return ClientData(
            np.concatenate([part.x_train for part in parts]),
            np.concatenate([part.y_train for part in parts]),
            np.concatenate([part.x_test for part in parts]),
            np.concatenate([part.y_test for part in parts]),
            self.dealt.group(client),
        )

    @cached_property
    def _held(self) -> Evolution[_Held]:
        return Evolution(_as_dealt(self.dealt), self._exchanged)

    def _exchanged(self, held: _Held, step: int) -> _Held:
        clients = len(held.train)
        after = _Held(held.holder.copy(), held.train.copy(), held.test.copy())
        for pair, (one, other) in enumerate(self.pairs(clients, step).tolist()):
            labels = self._labels(after, one, other, self.rng(f"labels {step}", pair))
            if labels is None:
                continue
            for label in labels:
                column = after.holder[:, label]
                had, got = column == one, column == other
                column[had], column[got] = other, one
                for counts in (after.train, after.test):
                    counts[[one, other], label] = counts[[other, one], label]
        return after

    def _labels(
        self, held: _Held, one: int, other: int, rng: np.random.Generator
    ) -> tuple[int, int] | None:
        """Draw the labels that a pair exchanges; None if it has none to exchange."""
        has = (held.train[[one, other]] + held.test[[one, other]]) > 0
        given, taken = np.flatnonzero(has[0] & ~has[1]), np.flatnonzero(has[1] & ~has[0])
        if len(given) == 0 or len(taken) == 0:
            return None
        label, back = int(rng.choice(given)), int(rng.choice(taken))
        for counts in (held.train, held.test):
            moved = counts[one, label] - counts[other, back]
            # A client without a sample to train with, or to test with, could not go on.
            if counts[one].sum() - moved < 1 or counts[other].sum() + moved < 1:
                return None
        return label, back


def _as_dealt(dealt: Dealt) -> _Held:
    labels = dealt.dataset.num_classes
    own = [(dealt.indices(client), dealt.group(client)) for client in range(dealt.clients)]
    train, test = (
        np.array(
            [np.bincount(dealt.labels(pair[part], group), minlength=labels) for pair, group in own]
        )
        for part in (0, 1)
    )
    holder = np.repeat(np.arange(dealt.clients)[:, None], labels, axis=1)
    return _Held(holder, train, test)


def _of_labels(data: ClientData, wanted: NDArray[np.bool_]) -> ClientData:
    """Return the samples of some labels; `wanted` says which, shape (labels,)."""
    train, test = wanted[data.y_train], wanted[data.y_test]
    return ClientData(
        data.x_train[train], data.y_train[train], data.x_test[test], data.y_test[test], data.group
    )
