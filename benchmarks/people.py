"""A dataset of UCI HAR with few windows of motion per person, and phones carried in different ways.

`benchmarks/alone_or_together.toml` uses it: with phones rotated at random, no common model learns.
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy.spatial.transform import Rotation

from raceme.core.config import RunConfig
from raceme.core.options import option
from raceme.datasets.npz import NpzFolder
from raceme.datasets.source import Dataset, generator

TEST = 60


@dataclass(frozen=True)
class PeopleOptions:
    """The windows that are kept of each person, and how phones are carried."""

    few: int = option(102, "training windows per person", low=1)
    turned: bool = option(False, "turn each person's phone, by a rotation of its own")


class People(NpzFolder):
    """The first people of UCI HAR, each with few windows: `convert_data.py uci-har`."""

    options_type = PeopleOptions

    def load(self, config: RunConfig) -> Dataset:
        """Return the windows of all people, shape (N, 9, 128): three sensors of three axes."""
        options, data = config.read(PeopleOptions), super().load(config)
        rng = generator(config.seed, "people")
        x, users, tests = np.array(data.x, np.float32), [], []
        assert data.users is not None, "files are of people"
        assert data.test_users is not None, "their windows are divided"
        for user, test in zip(data.users, data.test_users, strict=True):
            own = rng.permutation(np.concatenate([user, test]))[: options.few + TEST]
            if options.turned:
                sensors = x[own].reshape(len(own), 3, 3, -1)
                turn = Rotation.random(random_state=rng.integers(2**31)).as_matrix()
                turned = np.einsum("ij,nsjt->nsit", turn, sensors)
                x[own] = turned.reshape(len(own), 9, -1).astype(np.float32)
            users.append(own[TEST:])
            tests.append(own[:TEST])
        return replace(data, x=x, users=tuple(users), test_users=tuple(tests))

    def _folders(self, config: RunConfig) -> tuple[str, ...]:
        return ("uci-har",)
