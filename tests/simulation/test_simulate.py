"""Anybody's Flower app on virtual time: times, states, random numbers, and other strategies."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from flower_apps import CLIENT, QUICKSTARTS, write_app

from raceme.core.errors import UserError
from raceme.simulation.apps import AppEnding, Settings, Simulated, simulate

TRAIN = "replies = list(grid.send_and_receive(messages(grid)))"
FEDAVG = "FedAvg().start(grid, ArrayRecord([np.zeros(4)]), num_rounds=2)"


def run(app: Path, out: Path, **options: object) -> Simulated:
    settings = {"clients": 4, "workers": 0, "devices": "uniform", "out": out, **options}
    return simulate(Settings(app, **settings))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apps write their models to the working folder."""
    monkeypatch.chdir(tmp_path)


def spans(simulated: Simulated) -> list[tuple[str, float, float]]:
    """Return who was at work when."""
    tasks = [task for task in simulated.fleet.tasks if task.takes_time]
    return [(task.client, task.begun, task.ended) for task in tasks]


def test_the_numpy_quickstart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = QUICKSTARTS / "numpy_app"
    first = run(app, tmp_path / "one", run_config=("num-server-rounds=4",), devices="slow30x5")
    with np.load("final_model.npz") as stored:
        weights = stored["arr_0"]
    assert first.ending is AppEnding.RETURNED
    # It learns what the data were made of, and what Flower prints is there.
    assert np.abs(weights - np.arange(8) / 8).max() < 0.4
    assert "aggregate_train: Received 4 results and 0 failures" in caplog.text
    assert f"Strategy execution finished in {first.fleet.end:.2f}s" in caplog.text
    # Clients remember what they have kept: in the fourth round it is the fourth that they train in.
    assert "'rounds': 4.0" in caplog.text
    again = run(app, tmp_path / "two", run_config=("num-server-rounds=4",), devices="slow30x5")
    assert again.fleet == first.fleet
    with np.load("final_model.npz") as stored:
        assert np.array_equal(stored["arr_0"], weights)
    other = run(app, tmp_path / "three", devices="slow30x5", seed=1)
    assert other.fleet != first.fleet


def test_the_scikit_learn_quickstart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    # How large a reply is shows when there has been one.
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
    # 10 samples of the one and 20 of the other; each has trained once in each round.
    assert spans(simulated) == [
        *sorted([("client-0", 0.0, 2.0), ("client-1", 0.0, 3.0)], key=_order(simulated, 0)),
        *sorted([("client-0", 3.0, 5.0), ("client-1", 3.0, 6.0)], key=_order(simulated, 1)),
    ]
    assert not any(task.failure for task in simulated.fleet.tasks)
    fixed = run(app, tmp_path / "fixed", devices=str(devices), clients=2, examples=5)
    assert fixed.fleet.end == 3.0


def _order(simulated: Simulated, server_round: int) -> object:
    """Return the order in which a round's messages were sent, which is drawn."""
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
    # What the process itself draws afterwards is what it would have drawn.
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
    # Each stage of training would take about a second.
    assert simulated.fleet.end == pytest.approx(1.0, abs=0.2)
