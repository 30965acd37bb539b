"""A Flower app in `flwr run` and in `raceme simulate`: the same model, bit for bit."""

import importlib.util
from pathlib import Path

import pytest
import torch
from flower_apps import QUICKSTARTS
from processes import Loopback, loopback, raceme

APP = QUICKSTARTS / "torch_app"


def ray(place: Loopback, clients: int, run_config: str) -> None:
    fleet = f"num-supernodes={clients} client-resources-num-cpus=1"
    options = ("--stream", "--federation-config", fleet, "--run-config", run_config)
    run = place.flwr("run", str(APP), *options)
    run.wait_for("Strategy execution finished", 240)
    assert run.wait() == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs raceme[simulation]")
@pytest.mark.parametrize(("clients", "in_order"), [(2, "false"), (5, "true")])
def test_fedavg_gives_the_same_model_bit_for_bit(
    tmp_path: Path, clients: int, in_order: str
) -> None:
    """Two numbers have the same sum in any order; for more, the app fixes the order."""
    config = f"num-server-rounds=5 in-order={in_order}"
    with loopback(tmp_path) as place:
        place.superlink("--insecure", "--simulation")
        ray(place, clients, f'{config} model-file="{tmp_path}/ray.pt"')
        ours = f'{config} model-file="{tmp_path}/virtual.pt"'
        arguments = ("--clients", str(clients), "--run-config", ours, "--workers", "2")
        run = place.start("raceme", raceme("simulate", str(APP), *arguments))
        assert run.wait(240) == 0, run.describe()
    one, other = (torch.load(tmp_path / f"{name}.pt") for name in ("ray", "virtual"))
    assert one.keys() == other.keys()
    assert len(one) == 11
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["fc2.bias"], torch.zeros(4))
