"""Flower apps on virtual time: loading, polling, replaced strategies, artefacts."""

from __future__ import annotations

import random
import sys
import threading
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from flower_apps import CLIENT, QUICKSTARTS, write_app
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy

from raceme.core.errors import UserError
from raceme.core.strategy import Method
from raceme.flower import installed_flower
from raceme.records.record import read_run
from raceme.simulation.apps import (
    AppEnding,
    Settings,
    Simulated,
    read_app,
    simulate,
    write_results,
)
from raceme.simulation.executor import load

TRAIN = "replies = list(grid.send_and_receive(messages(grid)))"
FEDAVG = "FedAvg().start(grid, ArrayRecord([np.zeros(4)]), num_rounds=2)"


def run(app: Path, out: Path, **options: object) -> Simulated:
    settings = {"clients": 4, "workers": 0, "devices": "uniform", "out": out, **options}
    return simulate(Settings(app, **settings))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let apps write their models to a temporary folder."""
    monkeypatch.chdir(tmp_path)


def spans(simulated: Simulated) -> list[tuple[str, float, float]]:
    """Return client, start and end of each task."""
    tasks = [task for task in simulated.fleet.tasks if task.takes_time]
    return [(task.client, task.begun, task.ended) for task in tasks]


def test_the_numpy_quickstart_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = QUICKSTARTS / "numpy_app"
    first = run(app, tmp_path / "one", run_config=("num-server-rounds=4",), devices="slow30x5")
    with np.load("final_model.npz") as stored:
        weights = stored["arr_0"]
    assert first.ending is AppEnding.RETURNED
    # The model approaches the coefficients of the data, and Flower's messages are logged.
    assert np.abs(weights - np.arange(8) / 8).max() < 0.4
    assert "aggregate_train: Received 4 results and 0 failures" in caplog.text
    assert f"Strategy execution finished in {first.fleet.end:.2f}s" in caplog.text
    # Clients keep their state: the fourth round is the fourth that they train in.
    assert "'rounds': 4.0" in caplog.text
    again = run(app, tmp_path / "two", run_config=("num-server-rounds=4",), devices="slow30x5")
    assert again.fleet == first.fleet
    with np.load("final_model.npz") as stored:
        assert np.array_equal(stored["arr_0"], weights)
    other = run(app, tmp_path / "three", devices="slow30x5", seed=1)
    assert other.fleet != first.fleet


def test_the_scikit_learn_quickstart_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated = run(QUICKSTARTS / "sklearn_app", tmp_path / "out", clients=3)
    assert simulated.ending is AppEnding.RETURNED
    accuracy = float(capsys.readouterr().out.partition("'accuracy': ")[2].rstrip("}\n"))
    assert accuracy > 0.7


@pytest.mark.parametrize(
    "workers", [(0, 0), pytest.param((0, 2), marks=pytest.mark.slow)], ids=["again", "side-by-side"]
)
def test_the_pytorch_quickstart_gives_the_same_model(
    tmp_path: Path, workers: tuple[int, int]
) -> None:
    models = []
    for number, count in enumerate(workers):
        simulated = run(
            *(QUICKSTARTS / "torch_app", tmp_path / str(number)),
            workers=count,
            clients=3,
            run_config=("num-server-rounds=2",),
        )
        assert simulated.ending is AppEnding.RETURNED
        models.append(torch.load("final_model.pt"))
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_rounds_take_as_long_as_their_slowest_client(tmp_path: Path) -> None:
    devices = tmp_path / "devices.toml"
    devices.write_text("[[group]]\nclients = [2]\nseconds-per-round = 4.0")
    app = write_app(tmp_path, "works_in_rounds", FEDAVG)
    simulated = run(app, tmp_path / "out", devices=str(devices), clients=3)
    fast = [(0.0, 1.0), (4.0, 5.0)]
    assert simulated.fleet.busy() == {
        "client-0": fast,
        "client-1": fast,
        "client-2": [(0.0, 4.0), (4.0, 8.0)],
    }
    assert simulated.fleet.end == 8.0


def test_transfers_take_time(tmp_path: Path) -> None:
    devices = tmp_path / "devices.toml"
    devices.write_text("[device]\nbandwidth-down = 100.0\nbandwidth-up = 10.0")
    client = CLIENT.replace(
        '    return answer(msg, **{"num-examples": 10 * (1',
        '    msg.content["arrays"] = ArrayRecord([np.zeros(16)])\n'
        '    return answer(msg, **{"num-examples": 10 * (1',
    )
    twice = f"{TRAIN}\n{TRAIN}\nprint(replies)"
    app = write_app(tmp_path, "sends_more_than_it_gets", twice, client)
    simulated = run(app, tmp_path / "out", devices=str(devices), clients=1)
    one, other = simulated.fleet.tasks
    assert one.bytes_down == other.bytes_down
    assert other.bytes_up == one.bytes_up > one.bytes_down
    # The size of replies is known after the first one.
    down = one.bytes_down
    assert one.ended - one.begun == pytest.approx(down / 100 + 1 + down / 10)
    assert other.ended - other.begun == pytest.approx(down / 100 + 1 + one.bytes_up / 10)


def test_evaluation_takes_the_time_that_it_is_said_to(tmp_path: Path) -> None:
    devices = tmp_path / "devices.toml"
    devices.write_text("")
    app = write_app(tmp_path, "evaluates", FEDAVG)
    options = {"clients": 2, "devices": str(devices)}
    assert run(app, tmp_path / "free", **options).fleet.end == 2.0
    simulated = run(app, tmp_path / "out", **options, evaluation_share=0.25)
    assert simulated.fleet.end == 2.5
    assert simulated.fleet.busy()["client-0"] == [(0, 1), (1, 1.25), (1.25, 2.25), (2.25, 2.5)]


PER_SAMPLE = "[device]\nseconds-per-round = 1.0\nseconds-per-sample = 0.1"


def test_times_per_sample_come_from_what_replies_state(tmp_path: Path) -> None:
    devices = tmp_path / "devices.toml"
    devices.write_text(PER_SAMPLE)
    client = CLIENT.replace(
        "@app.train()\ndef train(msg: Message, context: Context):\n",
        "@app.train()\ndef train(msg: Message, context: Context):\n"
        "    seen = context.state.metric_records.get('seen', MetricRecord({'n': 0}))['n'] + 1\n"
        "    context.state['seen'] = MetricRecord({'n': seen})\n"
        "    assert seen == 1 + (msg.content['config']['server-round'] - 1), seen\n",
    )
    app = write_app(tmp_path, "states_examples", FEDAVG, client)
    simulated = run(app, tmp_path / "out", devices=str(devices), clients=2)
    # The one has 10 samples, the other 20; each trains once per round.
    assert spans(simulated) == [
        *sorted([("client-0", 0.0, 2.0), ("client-1", 0.0, 3.0)], key=_order(simulated, 0)),
        *sorted([("client-0", 3.0, 5.0), ("client-1", 3.0, 6.0)], key=_order(simulated, 1)),
    ]
    assert not any(task.failure for task in simulated.fleet.tasks)
    fixed = run(app, tmp_path / "fixed", devices=str(devices), clients=2, examples=5)
    assert fixed.fleet.end == 3.0


def _order(simulated: Simulated, server_round: int) -> object:
    """Return the order in which a round's messages were sent, which is random."""
    tasks = [task for task in simulated.fleet.tasks if task.kind == "train"]
    names = [task.client for task in tasks[2 * server_round : 2 * server_round + 2]]
    return lambda span: names.index(span[0])


def test_work_that_was_done_early_is_done_again_on_another_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = tmp_path / "devices.toml"
    devices.write_text(PER_SAMPLE)
    client = CLIENT.replace('10 * (1 + context.node_config["partition-id"])', "seen")
    client = client.replace(
        "@app.train()\ndef train(msg: Message, context: Context):\n",
        """
def see(context, count):
    seen = context.state.metric_records.get("seen", MetricRecord({"n": 0}))["n"] + count
    context.state["seen"] = MetricRecord({"n": seen})
    return seen


@app.query()
def query(msg: Message, context: Context):
    return answer(msg, seen=see(context, 10))


@app.train()
def train(msg: Message, context: Context):
    seen = see(context, 1)
    (array,) = msg.content["arrays"].to_numpy_ndarrays()
    msg.content["arrays"] = ArrayRecord([array + 1])
""",
    )
    main = """
ids = list(grid.push_messages(messages(grid)))
list(grid.send_and_receive(messages(grid, "query")))
while not (replies := list(grid.pull_messages(ids))):
    pass
(array,) = replies[0].content["arrays"].to_numpy_ndarrays()
print(replies[0].content["metrics"]["num-examples"], array[0])
"""
    app = write_app(tmp_path, "is_asked_meanwhile", main, client)
    run(app, tmp_path / "out", devices=str(devices), clients=1)
    assert capsys.readouterr().out == "11 1.0\n"


def test_times_per_sample_of_an_app_that_states_no_examples(tmp_path: Path) -> None:
    devices = tmp_path / "devices.toml"
    devices.write_text(PER_SAMPLE)
    client = CLIENT.replace('"num-examples"', '"samples"')
    app = write_app(tmp_path, "states_no_examples", TRAIN, client)
    with pytest.raises(UserError, match="--examples N"):
        run(app, tmp_path / "out", devices=str(devices))
    assert run(app, tmp_path / "out", devices=str(devices), examples=40).fleet.end == 5.0


DRAWS = CLIENT.replace(
    '**{"num-examples": 10 * (1 + context.node_config["partition-id"])}',
    '**{"num-examples": 10, "drawn": random.random() + np.random.rand()}',
)
PRINTS = f"""
{TRAIN}
print([reply.content["metrics"]["drawn"] for reply in replies])
import random
print(random.random())
"""


def test_apps_that_do_not_seed_themselves_are_seeded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = write_app(tmp_path, "draws", PRINTS, DRAWS)
    random.seed(5)
    before = random.getstate()
    printed = []
    for number, options in enumerate(({}, {"workers": 2}, {"seed": 1})):
        run(app, tmp_path / str(number), **options)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]
    drawn = printed[0].splitlines()[0].strip("[]").split(", ")
    assert len(set(drawn)) == 4
    # The process's own random state is unchanged.
    assert random.getstate() == before


def test_what_clients_draw_does_not_change_what_the_serverapp_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for name, client in (("server_draws", CLIENT), ("both_draw", f"{DRAWS}\nrandom.random()\n")):
        run(
            write_app(tmp_path, name, PRINTS.replace('["drawn"]', ""), client),
            tmp_path / f"o{name}",
        )
        printed.append(capsys.readouterr().out.splitlines()[-1])
    assert printed[0] == printed[1]


def test_contexts_are_those_of_flowers_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = CLIENT.replace(
        "    return answer(msg, **{",
        "    print(context.node_id in (1000, 1001), context.node_config, context.run_config)\n"
        "    return answer(msg, **{",
    )
    main = f"print(context.run_config, len(context.state))\n{TRAIN}"
    app = write_app(tmp_path, "has_contexts", main, client)
    run(app, tmp_path / "out", clients=2, run_config=("rounds=9",))
    assert capsys.readouterr().out.splitlines() == [
        "{'rounds': 9, 'text': 'a'} 0",
        "True {'partition-id': 0, 'num-partitions': 2} {'rounds': 9, 'text': 'a'}",
        "True {'partition-id': 1, 'num-partitions': 2} {'rounds': 9, 'text': 'a'}",
    ]


def test_settings_may_be_empty(tmp_path: Path) -> None:
    server = """
config = ConfigRecord({"lr": 0.1, "text": "", "raw": b"", "list": []})
FedAvg().start(grid, ArrayRecord([np.zeros(4)]), num_rounds=1, train_config=config)
"""
    simulated = run(write_app(tmp_path, "empty_settings", server), tmp_path / "out")
    assert simulated.reason == ""
    assert not any(task.failure for task in simulated.fleet.tasks)


def test_nodes_have_what_the_node_config_says(tmp_path: Path) -> None:
    client = CLIENT.replace('context.node_config["partition-id"]', 'context.node_config["extra"]')
    server = TRAIN + "\nassert replies[0].content['metrics']['num-examples'] == 50"
    app = write_app(tmp_path, "node_config", server, client)
    simulated = run(app, tmp_path / "out", node_config=("extra=4 name='x'",))
    assert simulated.reason == ""
    with pytest.raises(UserError, match="--node-config partition-id: the simulation sets it"):
        run(app, tmp_path / "other", node_config=("partition-id=4",))


def test_of_the_stages_of_secure_aggregation_one_is_training(tmp_path: Path) -> None:
    server = """
for stage in ("setup", "share_keys", "collect_masked_vectors", "unmask"):
    asked = messages(grid)
    for message in asked:
        message.content["secaggplus_configs"] = ConfigRecord({"stage": stage})
    grid.send_and_receive(asked)
"""
    simulated = run(write_app(tmp_path, "secure_stages", server), tmp_path / "out")
    assert simulated.reason == ""
    # Otherwise each stage would take about a second, like training.
    assert simulated.fleet.end == pytest.approx(1.0, abs=0.2)


# Invalid Flower apps, and their errors.


def run_app(app: Path, **options: object) -> Simulated:
    settings = {"clients": 2, "workers": 0, "out": app / "out", **options}
    return simulate(Settings(app, **settings))  # type: ignore[arg-type]


def error(app: Path, **options: object) -> str:
    with pytest.raises(UserError) as raised:
        run_app(app, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_folder_without_an_app_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in error(tmp_path / "nothing")
    assert "no pyproject.toml" in error(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "a"\nversion = "1"')
    assert "Missing [tool.flwr.app] section" in error(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project")
    assert "is not a Flower app" in error(tmp_path)


def test_run_config_is_overridden_as_by_flwr_run(tmp_path: Path) -> None:
    folder = write_app(tmp_path, "is_configured", "pass")
    app = read_app(folder, ["rounds=7", "text='b c'"])
    assert app.run_config == {"rounds": 7, "text": "b c"}
    (tmp_path / "more.toml").write_text("rounds = 9")
    assert read_app(folder, [str(tmp_path / "more.toml")]).run_config["rounds"] == 9
    assert read_app(folder).run_config == {"rounds": 2, "text": "a"}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["round=7"], "Unknown key in --run-config 'round'. Did you mean 'rounds'?"),
        (["rounds"], "key=value"),
        (["rounds=a b"], "invalid format"),
        (["rounds=1", "more.toml"], "TOML files cannot be passed alongside"),
        (["missing.toml"], "missing.toml"),
    ],
)
def test_unreadable_run_config_is_an_error(tmp_path: Path, texts: list[str], message: str) -> None:
    folder = write_app(tmp_path, "is_misconfigured", "pass")
    with pytest.raises(UserError) as raised:
        read_app(folder, texts)
    assert message in str(raised.value)


def test_a_missing_dependency_is_named(tmp_path: Path) -> None:
    folder = write_app(tmp_path, "needs_a_package", "import some_package.inner")
    message = error(folder)
    assert "'some_package'" in message
    assert f"python3 -m pip install -e {folder}" in message


def test_a_missing_module_of_the_app_is_named(tmp_path: Path) -> None:
    folder = write_app(tmp_path, "lacks_a_module", "import lacks_a_module.task")
    message = error(folder)
    assert f"The app in {folder} imports 'lacks_a_module.task', which it does not" in message
    assert "pip install" not in message


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("import flwr.server.gone", "flwr.server.gone"),
        ("from flwr.app import Gone", "flwr.app.Gone"),
    ],
)
def test_names_that_flower_has_removed_are_reported(tmp_path: Path, line: str, name: str) -> None:
    message = error(write_app(tmp_path, f"of_another_release_{len(name)}", line))
    assert f"imports '{name}', which Flower {installed_flower()[1]} does not have" in message
    assert "pip install" not in message


def test_an_app_with_a_torchvision_that_does_not_fit_torch(tmp_path: Path) -> None:
    """A CPU build of torch with PyPI's torchvision: the import is repeated."""
    client = f"""
import sys

if "torchvision._meta_registrations" not in sys.modules:
    raise RuntimeError("operator torchvision::nms does not exist")
{CLIENT}
"""
    folder = write_app(tmp_path, "sees_pictures", "pass", client)
    with patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        assert isinstance(read_app(folder).load_client(), ClientApp)
        del sys.modules["torchvision._meta_registrations"], sys.modules["sees_pictures.client_app"]
        assert isinstance(load("sees_pictures.client_app:app"), ClientApp)


def test_missing_components_of_an_app_are_named(tmp_path: Path) -> None:
    folder = write_app(tmp_path, "has_no_parts", "pass")
    project = folder / "pyproject.toml"
    text = project.read_text()
    project.write_text(text.replace("has_no_parts.client_app:app", "has_no_parts.nowhere:app"))
    assert "no module 'has_no_parts.nowhere'" in error(folder)
    project.write_text(text.replace("has_no_parts.client_app:app", "has_no_parts.client_app:nope"))
    assert "Unable to load attribute nope" in error(folder)
    project.write_text(text.replace("client_app:app", "server_app:app"))
    assert "is not a ClientApp" in error(folder)


def test_an_app_that_cannot_be_imported(tmp_path: Path) -> None:
    folder = write_app(tmp_path, "has_a_typo", "pass", CLIENT + "\nanswr(1)\n")
    message = error(folder)
    assert "NameError: name 'answr' is not defined" in message
    assert "client_app.py:" in message
    folder = write_app(tmp_path, "has_bad_syntax", "if:")
    assert "server_app.py:20" in error(folder)


def test_flowers_older_interface_is_refused(tmp_path: Path) -> None:
    folder = write_app(tmp_path, "is_old", "pass")
    (folder / "is_old" / "server_app.py").write_text(
        "from flwr.serverapp import ServerApp\napp = ServerApp(server_fn=lambda context: None)"
    )
    assert "server_fn" in error(folder)


def test_an_exception_in_the_serverapp_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_app(tmp_path, "raises", "raise ValueError('no such model')")
    simulated = run_app(folder)
    assert simulated.ending is AppEnding.FAILED
    assert simulated.reason == "the ServerApp raised ValueError: no such model"
    # The traceback has the user's own lines only.
    trace = capsys.readouterr().err
    assert "raises/server_app.py" in trace
    assert "raceme/simulation" not in trace


def test_a_serverapp_that_exits_is_reported(tmp_path: Path) -> None:
    assert run_app(write_app(tmp_path, "exits", "raise SystemExit")).ending is AppEnding.RETURNED
    ended = run_app(write_app(tmp_path, "exits_with_3", "raise SystemExit(3)"))
    assert ended.reason == "the ServerApp ended the process with 3"


def test_ctrl_c_leaves_partial_results(tmp_path: Path) -> None:
    main = "list(grid.send_and_receive(messages(grid)))\nraise KeyboardInterrupt"
    interrupted = run_app(write_app(tmp_path, "is_interrupted", main))
    assert interrupted.ending is AppEnding.INTERRUPTED
    assert len(interrupted.fleet.tasks) == 2


def test_failures_of_half_of_the_replies_are_tolerated(tmp_path: Path) -> None:
    client = CLIENT.replace(
        '    return answer(msg, **{"num-examples": 10 * (1',
        "    if context.node_config['partition-id'] == 1:\n        raise ValueError('no data')\n"
        '    return answer(msg, **{"num-examples": 10 * (1',
    )
    start = (
        "FedAvg().start(grid, ArrayRecord([np.zeros(2)]), num_rounds=context.run_config['rounds'])"
    )
    simulated = run_app(write_app(tmp_path, "has_failures", start, client))
    assert simulated.ending is AppEnding.RETURNED
    failures = [task for task in simulated.fleet.tasks if task.failure]
    assert {task.client for task in failures} == {"client-1"}
    assert len(failures) == 2
    assert failures[0].failure is not None
    assert failures[0].failure.startswith("ValueError: no data\n")


OLD_SERVER = """
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg as OldFedAvg
from flwr.server.workflow import DefaultWorkflow
strategy = OldFedAvg(initial_parameters=ndarrays_to_parameters([np.zeros(4)]))
legacy = LegacyContext(context=context, config=ServerConfig(num_rounds=2), strategy=strategy)
DefaultWorkflow()(grid, legacy)
"""
OLD_CLIENT = """
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp


class Client(NumPyClient):
    def fit(self, parameters, config):
        return [values + 1 for values in parameters], 10, {}

    def evaluate(self, parameters, config):
        return 0.5, 10, {}


app = ClientApp(client_fn=lambda context: Client().to_client())
"""


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_thread_of_flowers_older_driver_interface_ends_silently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    simulated = run_app(write_app(tmp_path, "drives", OLD_SERVER, OLD_CLIENT))
    assert simulated.ending is AppEnding.RETURNED
    assert len(simulated.fleet.tasks) == 2 * 2 * 2
    assert not raised
    assert "Traceback" not in capsys.readouterr().err


def test_flowers_older_driver_interface_does_not_wait_for_clients_that_never_come(
    tmp_path: Path,
) -> None:
    server = OLD_SERVER.replace("OldFedAvg(", "OldFedAvg(min_available_clients=5, ")
    simulated = run_app(write_app(tmp_path, "waits_in_vain", server, OLD_CLIENT))
    assert simulated.ending is AppEnding.HALTED
    assert "min_available_clients" in simulated.reason


def test_flowers_older_driver_interface_waits_for_clients_on_virtual_time(tmp_path: Path) -> None:
    late = tmp_path / "late.toml"
    late.write_text("[[group]]\nclients = [1]\nonline = [[30, 1000]]")
    app = write_app(tmp_path, "waits_for_the_late", OLD_SERVER, OLD_CLIENT)
    simulated = simulate(Settings(app, 2, str(late), workers=0, out=tmp_path / "out"))
    assert simulated.ending is AppEnding.RETURNED
    assert min(task.sent for task in simulated.fleet.tasks) >= 30.0


def test_results_are_not_overwritten(tmp_path: Path) -> None:
    folder = write_app(tmp_path, "runs_twice", "pass")
    run_app(folder)
    assert "holds a run already" in error(folder)


def test_unknown_devices_and_methods_are_errors(tmp_path: Path) -> None:
    folder = write_app(tmp_path, "is_simulated", "pass")
    assert "Unknown device profile 'slow'" in error(folder, devices="slow")
    assert "Unknown strategy 'caza'" in error(folder, strategy="caza")
    assert "--strategy" in error(folder, parameters={"casa.gamma": 0.2})
    assert "--run-config" in error(folder, strategy="casa", parameters={"lr": 0.2})
    assert "casa.gama" in error(folder, strategy="casa", parameters={"casa.gama": 0.2})
    assert "starts no strategy" in error(folder, strategy="casa")
    # Failed attempts do not affect a later run.
    assert run_app(folder).ending is AppEnding.RETURNED


# ServerApps that poll, pause, read the clock or never return, on virtual time.


DEVICES = """
[device]
seconds-per-round = 2.0
[[group]]
clients = [1]
seconds-per-round = 5.0
"""


@pytest.fixture
def devices(tmp_path: Path) -> str:
    """Client 1 takes 5 seconds for a task, all others 2."""
    path = tmp_path / "devices.toml"
    path.write_text(DEVICES)
    return str(path)


def run_polls(tmp_path: Path, devices: str, name: str, main: str, **options: object) -> Simulated:
    app = write_app(tmp_path, name, main)
    settings = {"clients": 2, "workers": 0, "out": tmp_path / "out", **options}
    return simulate(Settings(app, devices=devices, **settings))  # type: ignore[arg-type]


def printed(text: str) -> list[list[float]]:
    """Return the numbers of each line in an app's output."""
    return [[float(word) for word in line.split()] for line in text.splitlines()]


def test_polls_with_pauses_see_the_replies_that_have_arrived(
    tmp_path: Path, devices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_polls(
        *(tmp_path, devices, "polls_with_pauses"),
        """
began = time.time()
ids = list(grid.push_messages(messages(grid)))
open_ids = set(ids)
while open_ids:
    replies = list(grid.pull_messages(ids))
    open_ids -= {reply.metadata.reply_to_message_id for reply in replies}
    print(time.time() - began, len(replies))
    time.sleep(3)
""",
    )
    assert printed(capsys.readouterr().out) == [[0, 0], [3, 1], [6, 1]]


def test_polls_without_pauses_wait_for_the_next_reply(
    tmp_path: Path, devices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated = run_polls(
        *(tmp_path, devices, "polls_without_pauses"),
        """
ids = list(grid.push_messages(messages(grid)))
replies = []
while len(replies) < len(ids):
    replies += grid.pull_messages(ids)
    print(time.monotonic(), len(replies))
""",
        clients=3,
    )
    # Two replies arrive at the same time, and are returned together.
    assert printed(capsys.readouterr().out) == [[0, 0], [2, 2], [5, 3]]
    assert simulated.ending is AppEnding.RETURNED
    assert simulated.fleet.end == 5.0


def test_a_deadline_on_the_wall_clock_is_one_on_the_virtual_clock(
    tmp_path: Path, devices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated = run_polls(
        *(tmp_path, devices, "has_a_deadline"),
        """
ids = list(grid.push_messages(messages(grid)))
deadline, replies = time.time() + 4, []
while time.time() < deadline and len(replies) < len(ids):
    replies += grid.pull_messages(ids)
    sleep(0.5)
print(time.perf_counter(), len(replies), time.time_ns() % 10**12 / 1e9)
""",
    )
    assert printed(capsys.readouterr().out) == [[4, 1, 604]]
    # The slow client had not answered, and was busy until the end.
    assert simulated.fleet.busy()["client-1"] == [(0.0, 4.0)]


def test_a_timeout_of_flowers_own_is_one_of_virtual_time(tmp_path: Path, devices: str) -> None:
    simulated = run_polls(
        *(tmp_path, devices, "has_a_timeout"),
        """
replies = list(grid.send_and_receive(messages(grid), timeout=3.0))
assert len(replies) == 1
assert len(list(grid.send_and_receive(messages(grid), timeout=60.0))) == 2
""",
    )
    assert simulated.ending is AppEnding.RETURNED
    # The slow client starts its second task after the first.
    assert simulated.fleet.end == 10.0


def test_only_the_serverapp_has_the_virtual_clock(tmp_path: Path, devices: str) -> None:
    real = time.time, time.sleep, time.perf_counter_ns
    client = """
import time
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    began = time.perf_counter()
    time.sleep(0.02)
    metrics = MetricRecord({"slept": time.perf_counter() - began, "now": time.time()})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
"""
    main = """
import threading

seen = []
thread = threading.Thread(target=lambda: (sleep(0.02), seen.append(time.time())))
thread.start()
thread.join()
assert seen[0] > 1_780_000_000
before = time.time()
for reply in grid.send_and_receive(messages(grid)):
    assert reply.content["metrics"]["slept"] >= 0.02
    assert reply.content["metrics"]["now"] > 1_780_000_000
assert time.time() - before == 5.0
"""
    app = write_app(tmp_path, "reads_the_clock", main, client)
    simulated = simulate(Settings(app, 2, devices, workers=0, out=tmp_path / "out"))
    assert simulated.reason == ""
    assert (time.time, time.sleep, time.perf_counter_ns) == real


@pytest.mark.parametrize(
    ("name", "main", "reason"),
    [
        ("asks_for_nothing", "while True:\n    grid.pull_messages([])", "for replies"),
        (
            "asks_for_an_unknown_reply",
            "while True:\n    try:\n        grid.pull_messages(['7'])\n"
            "    except Exception:\n        pass\n    time.sleep(60)",
            "for replies",
        ),
        (
            "waits_for_clients_in_vain",
            "while len(list(grid.get_node_ids())) < 5:\n    pass",
            "which clients are online",
        ),
        (
            "starts_a_strategy_in_vain",
            "FedAvg(min_available_nodes=5).start(grid, ArrayRecord([np.zeros(2)]), num_rounds=1)",
            "Try more --clients",
        ),
    ],
)
def test_a_serverapp_that_would_never_return_is_ended(
    tmp_path: Path, devices: str, name: str, main: str, reason: str
) -> None:
    simulated = run_polls(tmp_path, devices, name, main)
    assert simulated.ending is AppEnding.HALTED
    assert "never return" in simulated.reason
    assert reason in simulated.reason


def test_waiting_for_clients_that_come_back_moves_the_clock(tmp_path: Path) -> None:
    late = tmp_path / "late.toml"
    late.write_text("[[group]]\nclients = [1]\nonline = [[30, 1000]]")
    simulated = run_polls(
        *(tmp_path, str(late), "waits_for_clients"),
        """
FedAvg().start(grid, ArrayRecord([np.zeros(2)]), num_rounds=1)
while len(list(grid.get_node_ids())) > 1:
    pass
""",
    )
    assert simulated.ending is AppEnding.RETURNED
    assert simulated.fleet.offline["client-1"] == [(0.0, 30.0), (1000.0, 1000.0)]


def test_a_limit_of_virtual_time_ends_the_app(tmp_path: Path, devices: str) -> None:
    trains = "while True:\n    list(grid.send_and_receive(messages(grid)))"
    simulated = run_polls(tmp_path, devices, "trains_for_ever", trains, max_time=12.0)
    assert simulated.ending is AppEnding.HALTED
    assert "--max-time" in simulated.reason
    assert simulated.fleet.end == 12.0
    assert simulated.fleet.busy()["client-0"] == [(0.0, 2.0), (5.0, 7.0), (10.0, 12.0)]
    assert simulated.fleet.busy()["client-1"][-1] == (10.0, 12.0)


def test_a_grid_is_for_one_thread(tmp_path: Path, devices: str) -> None:
    threads = """
from concurrent.futures import ThreadPoolExecutor

with ThreadPoolExecutor() as pool:
    print(pool.submit(grid.get_node_ids).result())
"""
    with pytest.raises(Exception, match="from several threads"):
        run_polls(tmp_path, devices, "uses_threads", threads)


def test_a_client_that_goes_offline_is_missed_after_a_minute(tmp_path: Path) -> None:
    leaves = tmp_path / "leaves.toml"
    leaves.write_text(
        "[device]\nseconds-per-round = 10\n[[group]]\nclients = [1]\nonline = [[0, 4]]"
    )
    simulated = run_polls(
        *(tmp_path, str(leaves), "loses_a_client"),
        "replies = list(grid.send_and_receive(messages(grid), timeout=3600))\n"
        "assert [reply.has_error() for reply in replies] == [False, True]",
    )
    assert simulated.reason == ""
    assert simulated.fleet.end == 64.0
    (lost,) = [task for task in simulated.fleet.tasks if task.failure]
    assert (lost.begun, lost.ended, lost.answered) == (0.0, 4.0, 64.0)


# One of Raceme's methods in the place of an app's strategy.


PULLED_CLIENT = """
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

ONE_SLOW = "[device]\nseconds-per-round = 1.0\n[[group]]\nclients = [0]\nseconds-per-round = 4.0"


@pytest.mark.pictures
@pytest.mark.parametrize("kind", ["FedAvg", "Own"])
def test_a_method_takes_the_place_of_a_strategy(
    tmp_path: Path,
    kind: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    starts = Strategy.__dict__["start"], Method.__dict__["start"]
    devices = tmp_path / "devices.toml"
    devices.write_text(ONE_SLOW)
    server = OWN.format(kind=kind)
    if kind == "Own":
        # A class that is defined inside main() does not exist yet when strategies are replaced.
        server = server.split("\n\n\nresult")[1]
        server = f"result{server}"
    app = write_app(tmp_path, f"starts_{kind.lower()}", server, PULLED_CLIENT)
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
    # The app's own `start` is not called, and the result is the method's.
    assert capsys.readouterr().out == "RunResult\n"
    assert f"fedasync replaces {kind}." in caplog.text
    # The slow device does not delay others, and messages carry the app's configuration.
    tasks = [task for task in simulated.fleet.tasks if task.kind == "train"]
    assert not any(task.failure for task in tasks)
    assert len([task for task in tasks if task.answered <= 4.0]) > 8
    # The artefacts of the method's run are written, too.
    record = read_run(tmp_path / "out")
    assert len(record.updates.seq) >= 12
    assert len(set(record.updates.client)) == 3
    _, unwritten = write_results(simulated)
    assert not unwritten
    assert (tmp_path / "out" / "clusters.png").is_file()
    assert (Strategy.__dict__["start"], Method.__dict__["start"]) == starts
    assert FedAvg.start is Strategy.start


def replaced(tmp_path: Path, name: str, server: str, client: str = PULLED_CLIENT) -> Simulated:
    """Simulate an app of four clients, with FedAsync instead of its strategy."""
    app = write_app(tmp_path, name, server, client)
    options = {"clients": 4, "devices": "uniform", "strategy": "fedasync", "workers": 0}
    return simulate(Settings(app, out=tmp_path / "out", **options))  # type: ignore[arg-type]


START = "start(grid, ArrayRecord([np.zeros(4)]), 8, train_config=ConfigRecord({'lr': 1.0}))"


def test_a_method_keeps_the_arguments_of_the_strategy_that_it_replaces(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = "fraction_train=0.5, min_train_nodes=1, arrayrecord_key='weights'"
    server = f"from flwr.serverapp.strategy import FedAdam\nFedAdam({arguments}, eta=0.2).{START}"
    client = PULLED_CLIENT.replace('msg.content["arrays"]', 'msg.content["weights"]')
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
    client = PULLED_CLIENT.replace('"accuracy": 0.5, "loss": 0.5', '"top1": 0.25, "nll": 2.5')
    parameters = {"accuracy-key": "top1", "loss-key": "nll"}
    app = write_app(tmp_path, "named", OWN.format(kind="FedAvg").split("\n\n\n")[1], client)
    simulate(
        Settings(app, 3, strategy="casa", parameters=parameters, workers=0, out=tmp_path / "out")
    )
    evaluations = read_run(tmp_path / "out").evaluations
    assert set(evaluations.accuracy) == {0.25}
    assert set(evaluations.loss) == {2.5}
