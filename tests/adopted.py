"""The quickstarts' apps on virtual time, and with Raceme's kinds of work."""

from __future__ import annotations

from pathlib import Path

import quickstarts
from flwr.app import Context
from flwr.clientapp import ClientApp
from quickstarts import Net, samples, torch_app

from raceme.client_app import AddedKinds
from raceme.simulation import Device, Node, VirtualGrid
from raceme.training.clients import OwnData


def grid_of(app: ClientApp, nodes: int = 10, seed: int = 0) -> VirtualGrid:
    """A fleet of two devices, of which one is slower."""
    return VirtualGrid(
        app,
        [
            Node(
                node_id=1000 + index,
                device=Device(seconds_per_round=1.0 + index % 3),
                config={"partition-id": index, "num-partitions": nodes},
            )
            for index in range(nodes)
        ],
        {},
        seed=seed,
    )


def app_with_kinds() -> ClientApp:
    """The PyTorch app, extended by what the error message asks for if a method needs more."""

    def load(context: Context) -> OwnData:
        x, y = samples(context)
        return OwnData(Net(), x, y, x, y)

    kinds = AddedKinds(load)
    app = torch_app(mods=[kinds])
    app.query()(kinds.answer)
    return app


PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "quickstart"
version = "1.0.0"
dependencies = ["flwr"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "somebody"

[tool.flwr.app.components]
serverapp = "quickstart.server_app:app"
clientapp = "quickstart.client_app:app"

[tool.flwr.app.config]
num-server-rounds = 3
out = ""
"""

SERVER = """
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from {module} import {strategy}

from quickstart.task import Net, initial_net, load_net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = {strategy}({arguments})
    result = strategy.start(
        grid=grid,
        initial_arrays=initial_net(),
        train_config=ConfigRecord({{"lr": 0.1}}),
        num_rounds=int(context.run_config.get("num-server-rounds", 3)),
        evaluate_fn=global_evaluate,
    )
    print("CLUSTERS", len(getattr(result, "clusters", [0])))
    print("ROUNDS", sorted(result.evaluate_metrics_serverapp))
    print("TESTED", sorted(result.evaluate_metrics_clientapp))
    torch.save(result.arrays.to_torch_state_dict(), context.run_config.get("out") or "model.pt")
    print("SAVED")


def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    net = load_net(arrays)
    return MetricRecord({{"accuracy": 0.5, "norm": float(net.fc1.weight.detach().norm())}})
"""


def write_quickstart(
    folder: Path,
    strategy: str = "CASA",
    arguments: str = "fraction_train=0.5",
    module: str = "raceme.strategies",
) -> Path:
    """Write the PyTorch quickstart as a Flower app in which only the strategy is replaced."""
    package = folder / "quickstart"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    (package / "__init__.py").touch()
    source = Path(quickstarts.__file__).read_text(encoding="utf-8")
    assert "import raceme" not in source
    assert "from raceme" not in source
    (package / "task.py").write_text(source)
    (package / "client_app.py").write_text(
        "from quickstart.task import torch_app\n\napp = torch_app()\n"
    )
    server = SERVER.format(strategy=strategy, arguments=arguments, module=module)
    (package / "server_app.py").write_text(server)
    return folder
