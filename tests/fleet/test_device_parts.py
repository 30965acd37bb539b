"""Parts of `raceme device`: which apps run, retries, stopping, memory, bad input."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from bundles import IDLE_CLIENT, announced, bundle, project
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesResponse
from flwr.proto.message_pb2 import (
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from processes import ROOT

import raceme as package
from raceme.core.errors import UserError
from raceme.core.messages import CLIENT_ID, CONFIG
from raceme.core.signals import StopSignal
from raceme.fleet.device import (
    NotAcceptedError,
    PatientCalls,
    Pause,
    RunOverError,
    StoppedError,
    data_memory,
    limit_memory,
)
from raceme.fleet.tasks import (
    Apps,
    InterruptedTaskError,
    Interrupter,
    LoadedRun,
    RefusedAppError,
    TaskRunner,
    Trust,
)
from raceme.flower import fleet_client as fleet
from raceme.flower.fleet_client import RejoinError
from raceme.flower.messages import INVALID_APP, LOAD_APP_EXCEPTION, identify_process
from raceme.training import machine as hardware

# Apps that run.


def load(data: bytes, run: fleet.Run, trusted: tuple[str, ...] = ()) -> Message:
    """Load the app of a run and return its answer to a training message."""
    with closing(Apps(Trust(trusted))) as apps:
        loaded = apps.of_run(run.run_id, lambda _: run, lambda _: data)
        identify_process()
        message = Message(RecordDict(), 1, "train")
        return loaded.app(message, Context(7, 1, {}, RecordDict(), loaded.config))


def trap(path: Path) -> str:
    """Return a client app that leaves a file as soon as any of its code runs."""
    return f"open({str(path)!r}, 'w').close()\n{IDLE_CLIENT}"


def test_an_app_with_the_announced_hash_runs() -> None:
    data = bundle()
    assert load(data, announced(data), trusted=("tests/small",)).has_content()


def test_nothing_of_an_app_is_executed_if_its_hash_is_another(tmp_path: Path) -> None:
    data = bundle(trap(tmp_path / "trace"))
    with pytest.raises(RefusedAppError, match="hash") as refused:
        load(data, announced(bundle()))
    assert refused.value.code == INVALID_APP
    assert not (tmp_path / "trace").exists()


def test_nothing_of_an_app_is_executed_that_is_not_trusted(tmp_path: Path) -> None:
    data = bundle(trap(tmp_path / "trace"))
    with pytest.raises(RefusedAppError, match="tests/small is not trusted"):
        load(data, announced(data), trusted=("raceme/raceme",))
    assert not (tmp_path / "trace").exists()


def test_an_app_cannot_pass_for_another(tmp_path: Path) -> None:
    data = bundle(trap(tmp_path / "trace"))
    with pytest.raises(RefusedAppError, match=r"announced raceme/raceme 0\.1\.0"):
        load(data, announced(data, "raceme/raceme", "0.1.0"), trusted=("raceme/raceme",))
    assert not (tmp_path / "trace").exists()


def test_racemes_own_code_is_the_installed_one(tmp_path: Path) -> None:
    text = project("raceme", "raceme", package.__version__)
    data = bundle(trap(tmp_path / "trace"), text)
    run = announced(data, "raceme/raceme", package.__version__)
    from raceme.client_app import app

    assert Apps().of_run(7, lambda _: run, lambda _: data).app is app
    assert not (tmp_path / "trace").exists()


def test_another_version_of_raceme_is_refused() -> None:
    data = bundle(pyproject=project("raceme", "raceme", "99.0.0"))
    with pytest.raises(RefusedAppError, match=r"run is of raceme 99\.0\.0") as refused:
        load(data, announced(data, "raceme/raceme", "99.0.0"))
    assert refused.value.code == LOAD_APP_EXCEPTION


def test_two_apps_with_the_same_module_names_do_not_mix() -> None:
    bundles = {number: bundle(f"{IDLE_CLIENT}\napp.number = {number}\n") for number in (1, 2)}
    with closing(Apps()) as apps:
        seen = [
            apps.of_run(number, lambda key: announced(bundles[key]), lambda _, data=data: data)
            for number, data in bundles.items()
        ]
    assert [vars(loaded.app)["number"] for loaded in seen] == [1, 2]


def test_an_app_that_cannot_be_imported_is_an_error_reply_not_a_crash() -> None:
    data = bundle("raise SystemExit(3)")
    with pytest.raises(RefusedAppError, match="cannot be loaded: SystemExit"):
        load(data, announced(data))


def test_a_trusted_app_needs_publisher_and_name() -> None:
    with pytest.raises(UserError, match="PUBLISHER/NAME"):
        Trust(("raceme",))


# Waiting, retrying, stopping.


def test_pauses_grow_to_the_longest_and_start_again() -> None:
    pause = Pause(1.0, 4.0, growth=2.0, uniform=lambda low, high: (low + high) / 2)
    assert [pause.next() for _ in range(4)] == [1.0, 2.0, 4.0, 4.0]
    pause.reset()
    assert pause.next() == 1.0


def test_pauses_of_two_devices_differ() -> None:
    one, other = Pause(1.0, 1.0), Pause(1.0, 1.0)
    assert [one.next() for _ in range(4)] != [other.next() for _ in range(4)]
    assert 0.8 <= one.next() <= 1.2


class Failure(grpc.RpcError):  # type: ignore[misc]
    def __init__(self, code: grpc.StatusCode, details: str = "") -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


class Immediate(StopSignal):
    """Does not wait."""

    def wait(self, seconds: float) -> bool:
        return self.is_set()


class Server:
    """Fails with the given errors, then answers."""

    def __init__(self, *failures: Failure) -> None:
        self.failures = list(failures)
        self.timeouts: list[float] = []

    def __call__(self, request: object, timeout: float) -> str:
        self.timeouts.append(timeout)
        if self.failures:
            raise self.failures.pop(0)
        return "answer"


CODE = grpc.StatusCode
LOST = Failure(CODE.UNAVAILABLE, "recvmsg: Connection reset by peer")
DOWN = Failure(CODE.UNAVAILABLE, "failed to connect to all addresses")


def calls(stop: StopSignal | None = None) -> PatientCalls:
    return PatientCalls(stop or Immediate(), fleet.Endpoint("host:1", insecure=True))


@pytest.mark.parametrize("code", [CODE.UNAUTHENTICATED, CODE.FAILED_PRECONDITION])
def test_a_refused_clock_may_be_set_later(
    code: grpc.StatusCode, caplog: pytest.LogCaptureFixture
) -> None:
    """The first code comes from a SuperLink, the second from `raceme serve`."""
    server = Server(*[Failure(code, "Invalid timestamp: by the server's clock …")] * 3)
    assert calls().invoke(server, object()) == "answer"
    assert "host:1 does not accept this device's clock: set the time" in caplog.text


def test_calls_are_repeated_until_the_network_is_back() -> None:
    server = Server(*[DOWN] * 30, LOST, Failure(CODE.DEADLINE_EXCEEDED))
    assert calls().invoke(server, object()) == "answer"
    assert len(server.timeouts) == 33


@pytest.mark.parametrize(("failure", "doubtful"), [(LOST, True), (DOWN, False)])
def test_a_request_for_work_that_may_have_been_served_in_vain_is_remembered(
    failure: Failure, doubtful: bool
) -> None:
    made, server = calls(), Server(failure)
    made.invoke(server, fleet.PullMessagesRequest())
    assert made.pull_failed is doubtful
    assert server.timeouts == [20.0, 20.0]


@pytest.mark.parametrize(("failure", "stored"), [(LOST, True), (DOWN, False)])
def test_a_part_of_a_reply_that_arrived_the_first_time_has_arrived(
    failure: Failure, stored: bool
) -> None:
    # The error of a SuperLink that has the object already.
    failures = [failure]

    def push(request: object, timeout: float) -> PushObjectResponse:
        if failures:
            raise failures.pop()
        return PushObjectResponse(stored=False)

    assert calls().invoke(push, PushObjectRequest()).stored is stored


def test_a_device_whose_reply_cannot_be_delivered_joins_again(tmp_path: Path) -> None:
    class Undeliverable(fleet.Link):
        def __init__(self) -> None:
            self.node_id = 5

        def send(self, reply: Message, seconds: float) -> None:
            raise fleet.ObjectPushError("part", 7, "session")

    tasks = TaskRunner(Apps(Trust(("tests/other",))), {}, Interrupter(1.0))
    identify_process(7, 5)
    message = Message(RecordDict(), 5, "train")

    def unreachable() -> Message:
        raise fleet.ObjectPullError("part", "gone")

    with pytest.raises(RejoinError, match="a reply could not be delivered"):
        tasks.answer(Undeliverable(), message, unreachable)


@pytest.mark.parametrize(
    ("failure", "meaning", "match"),
    [
        (Failure(CODE.PERMISSION_DENIED, "the run"), RunOverError, "the run"),
        (Failure(CODE.UNAUTHENTICATED, "Invalid node ID"), RejoinError, "does not know"),
        (Failure(CODE.FAILED_PRECONDITION, "Failed to activate"), NotAcceptedError, "activate"),
        (Failure(CODE.FAILED_PRECONDITION, "must be registered"), UserError, "--key FILE"),
        (Failure(CODE.UNIMPLEMENTED), UserError, "grpc-rere"),
        (Failure(CODE.UNAVAILABLE, "Tls handshake failed"), UserError, "certificate"),
        (Failure(CODE.INVALID_ARGUMENT, "why"), RejoinError, "INVALID_ARGUMENT: why"),
        (
            Failure(CODE.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 8)"),
            RejoinError,
            r"refuses a reply of this size: .* \(9 vs. 8\)",
        ),
    ],
)
def test_a_failure_that_will_not_pass_says_what_it_means(
    failure: Failure, meaning: type[Exception], match: str
) -> None:
    with pytest.raises(meaning, match=match):
        calls().invoke(Server(failure), object())


def test_a_stopped_device_waits_no_longer() -> None:
    stop = Immediate()
    stop.set()
    with pytest.raises(StoppedError):
        calls(stop).invoke(Server(DOWN), object())


def test_leaving_is_tried_once_and_briefly() -> None:
    leaving, server = calls(), Server(DOWN)
    leaving.leaving = True
    with pytest.raises(grpc.RpcError):
        leaving.invoke(server, object())
    assert server.timeouts == [3.0]


def test_a_task_is_ended_after_its_grace() -> None:
    interrupter = Interrupter(grace=0.01)

    def work() -> None:
        with interrupter.interruptible():
            interrupter.stop()
            # Short calls, because a signal just before one long call would not interrupt it.
            while True:
                time.sleep(0.01)

    with pytest.raises(InterruptedTaskError):
        work()


def test_a_device_waits_in_a_process_with_more_than_a_thousand_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip("this process may not have that many")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    reader, writer = os.pipe()
    high = fcntl.fcntl(reader, fcntl.F_DUPFD, 1500)
    try:
        os.write(writer, b"!")
        stop = StopSignal()
        assert not stop.wait_or(high)
        stop.set()
        assert stop.wait_or(high)
    finally:
        for file in (reader, writer, high):
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_second_signal_ends_a_task_at_once_and_none_begins_later() -> None:
    interrupter = Interrupter(grace=1000.0)
    begun = []

    def work() -> None:
        with interrupter.interruptible():
            begun.append("task")
            interrupter.stop()
            interrupter.stop()

    for _ in range(2):
        with pytest.raises(InterruptedTaskError):
            work()
    assert begun == ["task"]


def test_a_task_that_finishes_in_time_is_left_alone() -> None:
    interrupter = Interrupter(grace=1000.0)
    with interrupter.interruptible():
        interrupter.stop()
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


# The device's information about itself, and its orders.


def test_a_device_states_its_machine_when_greeted() -> None:
    from raceme.client_app import app

    identify_process()
    greeting = Message(RecordDict(), 1, "query")
    node = {"partition-id": 0, "num-partitions": 4, "device-id": "kitchen"}
    reply = app(greeting, Context(1, 1, node, RecordDict(), {"groups": "0.5,0.5"}))
    stated = reply.content[CONFIG]
    assert isinstance(stated, ConfigRecord)
    assert stated[CLIENT_ID] == "kitchen"
    assert {**stated}.items() >= hardware.describe().items()
    cpus, memory = stated["cpu-count"], stated["memory-mib"]
    assert isinstance(cpus, int)
    assert cpus >= 1
    assert isinstance(memory, int)
    assert memory > 100


def test_a_memory_limit_below_what_is_in_use_is_refused() -> None:
    with pytest.raises(UserError, match="too low"):
        limit_memory(1)
    assert data_memory() > 1024 * 1024


def test_a_memory_limit_makes_large_tasks_fail_and_no_more(tmp_path: Path) -> None:
    script = (
        "import torch\n"
        "from raceme.fleet.device import data_memory, limit_memory\n"
        "limit_memory(data_memory() // 2**20 + 200)\n"
        "torch.ones(10 * 2**20 // 4)\n"
        "try:\n    torch.ones(2**30 // 4)\n"
        "except RuntimeError:\n    torch.ones(10 * 2**20 // 4)\n    print('survived')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "survived"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--superlink", "server"], "HOST:PORT"),
        (["--superlink", "server:99999"], "HOST:PORT"),
        (["--superlink", "server:1", "--insecure", "--key", "x"], "plain text"),
        (["--superlink", "server:1", "--key", "/nowhere"], "cannot be read"),
        (["--superlink", "server:1", "--key", __file__], "OpenSSH"),
        (["--superlink", "server:1", "--root-certificates", __file__], "PEM"),
        (["--superlink", "server:1", "--node-config", "rubbish"], "key=value"),
        (
            ["--superlink", "server:1", "--insecure", "--node-config", "data-file='missing.npz'"],
            "There is no data file missing.npz",
        ),
        (["--superlink", "server:1", "--trusted-app", "raceme"], "PUBLISHER/NAME"),
        (["--superlink", "server:1", "--when", "never"], "expected at-once, interval=60s"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], match: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from raceme.cli import main

    monkeypatch.setattr(sys, "argv", ["raceme", "device", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("raceme:")]
    assert match in line


def test_a_message_whose_sender_died_half_way_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    identify_process()
    message = Message(RecordDict({CONFIG: ConfigRecord({"n": 1})}), 7, "train")
    tree = get_object_tree(message)

    def transport(name: str, _request: object, timeout: float | None = None) -> object:
        if name == "PullObject":
            return PullObjectResponse(object_found=True, object_available=False)
        return PullMessagesResponse(
            messages_list=[message_to_proto(message)], message_object_trees=[tree]
        )

    link = fleet.Link(7, transport, calls(), None)
    monkeypatch.setattr(fleet, "ANNOUNCED_SECONDS", 0.1)
    received = link.receive()
    assert received is not None
    _, fetch = received
    with pytest.raises(fleet.ObjectPullError):
        fetch()


def test_what_a_client_keeps_goes_over_to_a_run_that_resumes_and_to_no_other() -> None:
    tasks = TaskRunner(Apps(Trust(("tests/other",))), {}, Interrupter(1.0))

    def state(series: int, **config: str) -> RecordDict:
        return tasks._state_of(LoadedRun(ClientApp(), dict(config), series))

    state(1, out="runs/a")["kept"] = ConfigRecord({"of": "a"})
    state(2, out="runs/b")["kept"] = ConfigRecord({"of": "b"})
    assert dict(state(3, out="runs/c")) == {}
    resumed = state(4, resume="runs/a")
    assert resumed["kept"] == ConfigRecord({"of": "a"})
    # The state then belongs to the resumed run, which may be resumed again.
    resumed["more"] = ConfigRecord({"of": "a"})
    assert "more" not in state(1, out="runs/a")
    assert "more" in state(5, resume="runs/a")
    # A run with an automatic folder name may be the resumed one.
    state(6)["kept"] = ConfigRecord({"of": "nameless"})
    assert state(7, resume="runs/20260101-casa-digits")["kept"] == ConfigRecord({"of": "nameless"})
    assert dict(state(8, out="runs/a")) == {}
