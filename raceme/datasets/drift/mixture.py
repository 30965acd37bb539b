"""Clients whose data are a mixture of distributions that changes over time.

Li and Zhu, "Client-Driven Federated Learning" (CDFL). The distributions are the groups of the
partition: with rotation-groups, noise-groups and most scenarios all samples as each group sees
them, otherwise the samples of each group's clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.config.options import option
from raceme.datasets.drift.base import Drift, DriftOptions
from raceme.datasets.partition import largest_remainder
from raceme.datasets.skew import Inputs
from raceme.datasets.source import ClientData, Indices

_SHARES = (0.5, 2.0)
"""Smallest and largest size of a draw, relative to the mean client, if no size is given."""
_LEAST = 2


@dataclass(frozen=True)
class MixtureOptions(DriftOptions):
    """Options of mixture; the shares and what is done with the rest are the paper's."""

    mixture_main_low: float = option(
        0.4, "smallest share of a client's main distribution", above=0, high=1
    )
    mixture_main_high: float = option(
        0.9, "largest share of a client's main distribution", above=0, high=1
    )
    mixture_rest: str = option(
        "even",
        "how the others divide what is left, even or dirichlet",
        among=("even", "dirichlet"),
    )
    mixture_main: str = option(
        "kept",
        "whether a client's main distribution is kept or redrawn",
        among=("kept", "redrawn"),
    )
    mixture_size_low: int | None = option(
        None, "fewest training samples of a draw (auto: half the mean client's)", low=2
    )
    mixture_size_high: int | None = option(
        None, "most training samples of a draw (auto: twice the mean client's)", low=2
    )


@dataclass(frozen=True, eq=False)
class _Pools:
    """What is drawn from: samples by distribution, whose groups have these numbers, how many."""

    groups: tuple[int, ...]
    train: tuple[Indices, ...]
    test: tuple[Indices, ...]
    fewest: int
    most: int


class Mixture(Drift):
    """Each client's mixture of the groups' distributions is drawn anew at every step."""

    options_type = MixtureOptions
    needs_others = True

    @staticmethod
    def default_schedule(config: RunConfig) -> str:
        """Return a step after every upload of the client."""
        return "every upload"

    def check(self) -> None:
        """Raise UserError if there are no groups, or the bounds cross."""
        groups = set(self.dealt.partition.groups)
        if None in groups or len(groups) < 2:
            raise UserError(
                "drift mixture mixes the distributions of groups, and these clients have "
                f"{'no groups' if None in groups else 'only one'}: take partition "
                "rotation-groups, noise-groups or label-groups, or data with groups."
            )
        low, high = self.options.mixture_main_low, self.options.mixture_main_high
        if low > high:
            raise UserError(f"mixture-main-low {low:g} is above mixture-main-high {high:g}.")
        pools = self._pools
        if pools.fewest > pools.most:
            raise UserError(
                f"mixture-size-low {pools.fewest} is above mixture-size-high {pools.most}."
            )

    def data(self, client: int, step: int) -> ClientData:
        """Return a draw: as many test samples as training samples, from the same mixture.

        No sample that any client trains with is ever a test sample. Those of one distribution
        differ from one another while there are enough of them.
        """
        pools = self._pools
        rng = self.rng(f"mixture {step}", client)
        counts = self._counts(client, rng)

        def drawn(part: str, sources: tuple[Indices, ...]) -> tuple[Inputs, Indices]:
            x, y = [], []
            for source, count, group in zip(sources, counts.tolist(), pools.groups, strict=True):
                own = np.sort(rng.choice(source, count, replace=count > len(source)))
                x.append(self.dealt.inputs(own, group, client, f"{part} {step} {group}"))
                y.append(self.dealt.labels(own, group))
            return np.concatenate(x), np.concatenate(y)

        x_train, y_train = drawn("train", pools.train)
        x_test, y_test = drawn("test", pools.test)
        return ClientData(
            x_train,
            y_train,
            x_test,
            y_test,
            group=pools.groups[int(np.argmax(counts))],
            mixture=tuple((counts / counts.sum()).tolist()),
        )

    def groups(self, step: int) -> tuple[int | None, ...]:
        """Return the group that has the largest share of each client's draw."""
        return tuple(
            self._pools.groups[
                int(np.argmax(self._counts(client, self.rng(f"mixture {step}", client))))
            ]
            for client in range(self.dealt.clients)
        )

    def _counts(self, client: int, rng: np.random.Generator) -> Indices:
        """Draw how many samples come from each distribution, shape (groups,)."""
        pools, options = self._pools, self.options
        groups = len(pools.train)
        size = int(rng.integers(pools.fewest, pools.most, endpoint=True))
        main_share = rng.uniform(options.mixture_main_low, options.mixture_main_high)
        own = self.dealt.group(client)
        assert own is not None, "check() has seen that there are groups"
        kept = options.mixture_main == "kept"
        main = pools.groups.index(own) if kept else int(rng.integers(groups))
        others = np.full(groups - 1, 1.0 / (groups - 1))
        if options.mixture_rest == "dirichlet":
            others = rng.dirichlet(np.ones(groups - 1))
        shares = np.insert((1.0 - main_share) * others, main, main_share)
        return largest_remainder(size, shares)

    @cached_property
    def _pools(self) -> _Pools:
        own = [self.dealt.indices(client) for client in range(self.dealt.clients)]
        groups = np.array(self.dealt.partition.groups)
        numbers = tuple(np.unique(groups).tolist())
        mean = sum(len(train) for train, _ in own) / len(own)
        low, high = self.options.mixture_size_low, self.options.mixture_size_high
        train, test = (
            tuple(
                np.concatenate([own[i][part] for i in _members(groups, group, self.dealt.skewed)])
                for group in numbers
            )
            for part in (0, 1)
        )
        return _Pools(
            numbers,
            train,
            test,
            fewest=max(_LEAST, round(_SHARES[0] * mean)) if low is None else low,
            most=max(_LEAST, round(_SHARES[1] * mean)) if high is None else high,
        )


def _members(groups: NDArray[np.generic], group: int, everybody: bool) -> list[int]:
    """Return the clients whose samples make up a distribution."""
    return list(range(len(groups))) if everybody else np.flatnonzero(groups == group).tolist()
