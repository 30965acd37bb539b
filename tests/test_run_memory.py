"""What a process keeps of its runs: the samples of one at most, and of none once it has ended."""

import gc
import weakref
from pathlib import Path

from flwr.app import Context, RecordDict

from raceme import client_app, experiment
from raceme.config import RunConfig
from raceme.training import Samples


def config_of(seed: int, out: str = "") -> RunConfig:
    keys = {"clients": 8, "max-updates": 12, "workers": "0", "seed": seed, "out": out}
    return experiment.resolve(RunConfig.from_mapping(keys))


def client_of(config: RunConfig, partition: int) -> client_app.Client:
    node = {"partition-id": partition, "num-partitions": 8}
    return client_app.client_of(Context(1, partition, node, RecordDict(), config.to_mapping()))


def samples_in_memory() -> int:
    gc.collect()
    return sum(isinstance(thing, Samples) for thing in gc.get_objects())


def test_a_run_that_has_ended_leaves_no_samples_in_the_process(tmp_path: Path) -> None:
    before = samples_in_memory()
    for seed in (0, 1):
        experiment.simulate(config_of(seed, str(tmp_path / str(seed))))
        assert samples_in_memory() <= before


def test_clients_of_another_run_take_the_place_of_those_of_the_last() -> None:
    first, second = config_of(seed=0), config_of(seed=1)
    kept = [weakref.ref(client_of(first, partition)) for partition in (0, 1)]
    assert client_of(first, 0) is kept[0](), "within a run data are loaded once"
    client_of(second, 0)
    gc.collect()
    assert [reference() for reference in kept] == [None, None]
    client_app.forget()
