"""A process releases the samples of a run that has ended."""

import gc
from pathlib import Path

from raceme.core.config import RunConfig
from raceme.runs import experiment
from raceme.training.models import Samples


def config_of(seed: int, out: str = "") -> RunConfig:
    keys = {"clients": 8, "max-updates": 12, "workers": "0", "seed": seed, "out": out}
    return experiment.resolve(RunConfig.from_mapping(keys))


def samples_in_memory() -> int:
    gc.collect()
    return sum(isinstance(thing, Samples) for thing in gc.get_objects())


def test_a_run_that_has_ended_leaves_no_samples_in_the_process(tmp_path: Path) -> None:
    before = samples_in_memory()
    for seed in (0, 1):
        experiment.simulate(config_of(seed, str(tmp_path / str(seed))))
        assert samples_in_memory() <= before
