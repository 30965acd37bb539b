"""One of Raceme's methods in the place of the strategy that an app starts."""

from pathlib import Path

import pytest
from flower_apps import write_app
from flwr.serverapp.strategy import FedAvg, Strategy

from raceme.core.errors import UserError
from raceme.core.strategy import Method
from raceme.records.record import read_run
from raceme.simulation.apps import AppEnding, Settings, Simulated, simulate, write_results

CLIENT = """
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    records = {
        "arrays": msg.content["arrays"],
        "metrics": MetricRecord({"num-examples": 10, "train-loss": msg.content["config"]["lr"]}),
    }
    return Message(RecordDict(records), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    metrics = MetricRecord({"accuracy": 0.5, "loss": 0.5})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
"""

OWN = """
class Own(FedAvg):
    def start(self, grid, initial_arrays, num_rounds=3, **others):
        print("own start")
        return super().start(grid, initial_arrays, num_rounds, **others)


result = {kind}().start(
    grid, ArrayRecord([np.zeros(4)]), num_rounds=12, train_config=ConfigRecord({{"lr": 0.1}})
)
print(type(result).__name__)
"""

DEVICES = "[device]\nseconds-per-round = 1.0\n[[group]]\nclients = [0]\nseconds-per-round = 4.0"


@pytest.mark.parametrize("kind", ["FedAvg", "Own"])
def test_a_method_takes_the_place_of_a_strategy(
    tmp_path: Path,
    kind: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    starts = Strategy.__dict__["start"], Method.__dict__["start"]
    devices = tmp_path / "devices.toml"
    devices.write_text(DEVICES)
    server = OWN.format(kind=kind)
    if kind == "Own":
        # A class that is made inside main() is not there yet when strategies are replaced.
        server = server.split("\n\n\nresult")[1]
        server = f"result{server}"
    app = write_app(tmp_path, f"starts_{kind.lower()}", server, CLIENT)
    if kind == "Own":
        path = app / "starts_own" / "server_app.py"
        own = OWN.split("\n\n\nresult")[0]
        path.write_text(path.read_text().replace("@app.main()", f"{own}\n\n\n@app.main()"))
    settings = Settings(
        *(app, 3, str(devices), (), "fedasync", {"fedasync.alpha": 0.5}),
        workers=0,
        out=tmp_path / "out",
    )
    simulated = simulate(settings)
    assert simulated.reason == ""
    assert simulated.ending is AppEnding.RETURNED
    # The app's own start is not called, and what it returns is the method's.
    assert capsys.readouterr().out == "RunResult\n"
    assert f"fedasync replaces {kind}." in caplog.text
    # Nobody waits for the slow one, and messages have the app's configuration.
    tasks = [task for task in simulated.fleet.tasks if task.kind == "train"]
    assert not any(task.failure for task in tasks)
    assert len([task for task in tasks if task.answered <= 4.0]) > 8
    # What a run of the method leaves is there, too.
    record = read_run(tmp_path / "out")
    assert len(record.updates.seq) >= 12
    assert len(set(record.updates.client)) == 3
    _, unwritten = write_results(simulated)
    assert not unwritten
    assert (tmp_path / "out" / "clusters.png").is_file()
    assert (Strategy.__dict__["start"], Method.__dict__["start"]) == starts
    assert FedAvg.start is Strategy.start


def replaced(tmp_path: Path, name: str, server: str, client: str = CLIENT) -> Simulated:
    """Simulate an app of four clients with FedAsync in the place of its strategy."""
    app = write_app(tmp_path, name, server, client)
    options = {"clients": 4, "devices": "uniform", "strategy": "fedasync", "workers": 0}
    return simulate(Settings(app, out=tmp_path / "out", **options))  # type: ignore[arg-type]


START = "start(grid, ArrayRecord([np.zeros(4)]), 8, train_config=ConfigRecord({'lr': 1.0}))"


def test_a_method_keeps_the_arguments_of_the_strategy_that_it_replaces(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = "fraction_train=0.5, min_train_nodes=1, arrayrecord_key='weights'"
    server = f"from flwr.serverapp.strategy import FedAdam\nFedAdam({arguments}, eta=0.2).{START}"
    client = CLIENT.replace('msg.content["arrays"]', 'msg.content["weights"]')
    simulated = replaced(tmp_path, "keeps_arguments", server, client)
    tasks = [task for task in simulated.fleet.tasks if task.kind == "train"]
    assert not any(task.failure for task in tasks)
    # Half of the four clients train at a time.
    assert max(sum(t.sent <= task.sent < t.answered for t in tasks) for task in tasks) == 2
    assert "fedasync replaces FedAdam" in caplog.text
    assert "fraction_train=0.5" in caplog.text
    assert "Unused settings: eta" in caplog.text


CONFIGURES = """
class Decays(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        return super().configure_train(server_round, arrays, config, grid)


Decays()."""

WRAPS = """
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping as Wrapper
Wrapper(FedAvg(), noise_multiplier=1.0, clipping_norm=1.0, num_sampled_clients=4)."""


@pytest.mark.parametrize(
    ("name", "server", "reason"),
    [
        ("configures", CONFIGURES, "Decays: it has its own configure_train"),
        ("wraps", WRAPS, "it wraps FedAvg"),
        ("trains_none", "FedAvg(fraction_train=0.0).", "replace FedAvg: fraction_train must be"),
    ],
)
def test_a_strategy_whose_messages_a_method_cannot_send_is_not_replaced(
    tmp_path: Path, name: str, server: str, reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        replaced(tmp_path, name, server + START)


def test_an_app_that_trains_without_a_strategy_is_told_so_before_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = "grid.send_and_receive(messages(grid, 'query'))\nprint('asked')\n"
    server += "grid.send_and_receive(messages(grid))\nprint('trained')"
    with pytest.raises(UserError, match="starts no strategy of Flower's"):
        replaced(tmp_path, "trains_itself", server)
    assert capsys.readouterr().out == "asked\n"


def test_metrics_of_other_names_are_named_by_keys(tmp_path: Path) -> None:
    client = CLIENT.replace('"accuracy": 0.5, "loss": 0.5', '"top1": 0.25, "nll": 2.5')
    parameters = {"accuracy-key": "top1", "loss-key": "nll"}
    app = write_app(tmp_path, "named", OWN.format(kind="FedAvg").split("\n\n\n")[1], client)
    simulate(
        Settings(app, 3, strategy="casa", parameters=parameters, workers=0, out=tmp_path / "out")
    )
    evaluations = read_run(tmp_path / "out").evaluations
    assert set(evaluations.accuracy) == {0.25}
    assert set(evaluations.loss) == {2.5}
