"""ServerApps that poll, pause, read the clock and never return, on virtual time."""

import time
from pathlib import Path

import pytest
from flower_apps import write_app

from raceme.simulation.apps import AppEnding, Settings, Simulated, simulate

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


def run(tmp_path: Path, devices: str, name: str, main: str, **options: object) -> Simulated:
    app = write_app(tmp_path, name, main)
    settings = {"clients": 2, "workers": 0, "out": tmp_path / "out", **options}
    return simulate(Settings(app, devices=devices, **settings))  # type: ignore[arg-type]


def printed(text: str) -> list[list[float]]:
    """Return the numbers of each line that an app has printed."""
    return [[float(word) for word in line.split()] for line in text.splitlines()]


def test_looks_with_pauses_see_what_has_come_by_then(
    tmp_path: Path, devices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
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


def test_looks_without_pauses_wait_for_the_next_reply(
    tmp_path: Path, devices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated = run(
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
    # Two come at the same time, and together.
    assert printed(capsys.readouterr().out) == [[0, 0], [2, 2], [5, 3]]
    assert simulated.ending is AppEnding.RETURNED
    assert simulated.fleet.end == 5.0


def test_a_deadline_on_the_wall_clock_is_one_on_the_virtual_clock(
    tmp_path: Path, devices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated = run(
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
    # The slow one had not answered: it was at work to the end.
    assert simulated.fleet.busy()["client-1"] == [(0.0, 4.0)]


def test_a_timeout_of_flowers_own_is_one_of_virtual_time(tmp_path: Path, devices: str) -> None:
    simulated = run(
        *(tmp_path, devices, "has_a_timeout"),
        """
replies = list(grid.send_and_receive(messages(grid), timeout=3.0))
assert len(replies) == 1
assert len(list(grid.send_and_receive(messages(grid), timeout=60.0))) == 2
""",
    )
    assert simulated.ending is AppEnding.RETURNED
    # The slow one begins its second task when it is done with the first.
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
    simulated = run(tmp_path, devices, name, main)
    assert simulated.ending is AppEnding.HALTED
    assert "never return" in simulated.reason
    assert reason in simulated.reason


def test_waiting_for_clients_that_come_back_moves_the_clock(tmp_path: Path) -> None:
    late = tmp_path / "late.toml"
    late.write_text("[[group]]\nclients = [1]\nonline = [[30, 1000]]")
    simulated = run(
        *(tmp_path, str(late), "waits_for_clients"),
        """
FedAvg().start(grid, ArrayRecord([np.zeros(2)]), num_rounds=1)
while len(list(grid.get_node_ids())) > 1:
    pass
""",
    )
    assert simulated.ending is AppEnding.RETURNED
    assert simulated.fleet.offline["client-1"] == [(0.0, 30.0), (1000.0, 1000.0)]


def test_limits_of_time(tmp_path: Path, devices: str) -> None:
    trains = "while True:\n    list(grid.send_and_receive(messages(grid)))"
    simulated = run(tmp_path, devices, "trains_for_ever", trains, max_time=12.0)
    assert simulated.ending is AppEnding.HALTED
    assert "--max-time" in simulated.reason
    assert simulated.fleet.end == 12.0
    assert simulated.fleet.busy()["client-0"] == [(0.0, 2.0), (5.0, 7.0), (10.0, 12.0)]
    assert simulated.fleet.busy()["client-1"][-1] == (10.0, 12.0)


def test_a_limit_of_real_time_ends_a_loop_that_asks_for_nothing(
    tmp_path: Path, devices: str
) -> None:
    loops = "while True:\n    try:\n        np.zeros(3)\n    except Exception:\n        pass"
    simulated = run(tmp_path, devices, "calculates", loops, max_wall_time=0.3)
    assert simulated.ending is AppEnding.HALTED
    assert "--max-wall-time" in simulated.reason


def test_a_grid_is_for_one_thread(tmp_path: Path, devices: str) -> None:
    threads = """
from concurrent.futures import ThreadPoolExecutor

with ThreadPoolExecutor() as pool:
    print(pool.submit(grid.get_node_ids).result())
"""
    with pytest.raises(Exception, match="from several threads"):
        run(tmp_path, devices, "uses_threads", threads)


def test_a_client_that_goes_offline_is_missed_after_a_minute(tmp_path: Path) -> None:
    leaves = tmp_path / "leaves.toml"
    leaves.write_text(
        "[device]\nseconds-per-round = 10\n[[group]]\nclients = [1]\nonline = [[0, 4]]"
    )
    simulated = run(
        *(tmp_path, str(leaves), "loses_a_client"),
        "replies = list(grid.send_and_receive(messages(grid), timeout=3600))\n"
        "assert [reply.has_error() for reply in replies] == [False, True]",
    )
    assert simulated.reason == ""
    assert simulated.fleet.end == 64.0
    (lost,) = [task for task in simulated.fleet.tasks if task.failure]
    assert (lost.begun, lost.ended, lost.answered) == (0.0, 4.0, 64.0)
