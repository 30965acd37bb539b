"""The clients' data at a step, for tests of drifts."""

from __future__ import annotations

import numpy as np

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.datasets.source import ClientData


def config_of(drift: str, **keys: object) -> RunConfig:
    given = {"clients": 12, "drift": drift, **keys}
    return RunConfig.from_mapping({k.replace("_", "-"): v for k, v in given.items()})


def all_at(config: RunConfig, step: int) -> list[ClientData]:
    return datasets.all_clients(config, step)


def same(one: ClientData, other: ClientData) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("x_train", "y_train", "x_test", "y_test")
    )
