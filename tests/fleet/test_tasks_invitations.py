"""Devices that decide when they train: pending invitations, and their end."""

from __future__ import annotations

import logging
import math
import os
import random
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from bundles import announced, bundle, project
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from nodes import write_device

import raceme as package
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.fleet.tasks import Apps, Interrupter, Invitations, TaskRunner, When, parse_when
from raceme.flower.fleet_client import Link
from raceme.flower.messages import NODE_UNAVAILABLE, Run, identify_process, set_message_id
from raceme.training import models

# Values of --when.


@pytest.mark.parametrize(
    ("text", "when"),
    [
        ("at-once", When()),
        ("interval=60s", When("interval", 60.0)),
        ("interval=2min", When("interval", 120.0)),
        ("poisson=0.5h", When("poisson", 1800.0)),
        ("poisson=7", When("poisson", 7.0)),
        ("drift", When("drift", 10.0, 0.1)),
        ("drift=2.5%", When("drift", 10.0, 0.025)),
    ],
)
def test_the_option_when_is_read(text: str, when: When) -> None:
    assert parse_when(text) == when


@pytest.mark.parametrize(
    ("text", "look", "match"),
    [
        ("never", "10s", "expected at-once, interval=60s, poisson=60s, drift or drift=10%"),
        ("at-once=3s", "10s", "cannot be read"),
        ("interval", "10s", "cannot be read"),
        ("interval=", "10s", "--when interval must be a time above 0 such as 30s"),
        ("interval=0s", "10s", "got '0s'"),
        ("poisson=-3s", "10s", "--when poisson must be a time"),
        ("drift=0.1", "10s", "must be a share such as 10%, got '0.1'"),
        ("drift", "soon", "--look must be a time"),
    ],
)
def test_an_invalid_wish_to_train_is_explained(text: str, look: str, match: str) -> None:
    with pytest.raises(UserError, match=match):
        parse_when(text, look)


# Pending invitations.


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Middle(random.Random):
    """A generator whose draws are all in the middle of their range."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2

    def expovariate(self, lambd: float = 1.0) -> float:
        return 1 / lambd


def invitation(run_id: int = 7, ttl: float = 3600.0, **settings: object) -> Message:
    identify_process(run_id)
    config = ConfigRecord({"invitation": True, "task": 3, **settings})  # type: ignore[arg-type]
    return Message(RecordDict({"config": config}), 5, "train", ttl=ttl)


def holding(text: str, look: str = "10s") -> tuple[Invitations, Clock]:
    clock = Clock()
    return Invitations(parse_when(text, look), clock, Middle()), clock


def test_a_device_that_accepts_at_once_holds_no_invitation() -> None:
    assert not holding("at-once")[0].take(invitation())


def test_only_invitations_are_stored() -> None:
    invitations, _ = holding("interval=60s")
    assert not invitations.take(invitation(invitation=False))
    assert not invitations.take(invitation(invitation="yes"))
    assert not invitations.take(Message(RecordDict(), 5, "train"))
    assert invitations.take(invitation())


def test_a_device_that_trains_at_intervals_has_its_own_times() -> None:
    # The device started at 100 s: its times are 130 s, 190 s, 250 s.
    invitations, clock = holding("interval=60s")
    assert invitations.next_in() == math.inf
    invitations.take(invitation())
    assert invitations.next_in() == 30.0
    clock.now = 129.9
    assert invitations.due() is None
    clock.now = 130.0
    held = invitations.due()
    assert held is not None
    invitations.accept(held)
    assert invitations.due() is None
    clock.now = 191.0
    invitations.take(invitation())
    assert invitations.next_in() == 59.0


def test_poisson_waits_begin_with_the_invitation_and_go_on_with_a_newer_one() -> None:
    invitations, clock = holding("poisson=60s")
    invitations.take(invitation())
    clock.now = 140.0
    newer = invitation()
    invitations.take(newer)
    assert invitations.next_in() == 20.0
    clock.now = 160.0
    held = invitations.due()
    assert held is not None
    assert held.message is newer
    invitations.accept(held)
    assert invitations.due() is None


def test_poisson_waits_have_the_mean_that_was_said() -> None:
    clock = Clock()
    invitations = Invitations(parse_when("poisson=60s"), clock, random.Random(0))
    waits = []
    for _ in range(2000):
        invitations.take(invitation())
        waits.append(invitations.next_in())
        invitations.drop()
    # Four standard deviations of the mean.
    assert np.mean(waits) == pytest.approx(60.0, abs=4 * 60 / math.sqrt(2000))


def test_an_invitation_is_dropped_when_it_is_over() -> None:
    invitations, clock = holding("poisson=60s")
    message = invitation(ttl=50.0)
    message.metadata.created_at = time.time() - 20.0
    invitations.take(message)
    clock.now = 129.0
    assert invitations.due() is None
    assert invitations.next_in() == 31.0
    clock.now = 131.0
    assert invitations.due() is None
    assert invitations.next_in() == math.inf


@pytest.mark.parametrize("ahead", [-1e6, 1e6])
def test_a_wrong_clock_costs_no_invitation(ahead: float) -> None:
    invitations, clock = holding("poisson=60s")
    message = invitation(ttl=70.0)
    message.metadata.created_at = time.time() + ahead
    invitations.take(message)
    clock.now = 165.0
    assert invitations.due() is not None


def test_each_run_has_an_invitation_of_its_own() -> None:
    invitations, clock = holding("poisson=60s")
    for run_id in (7, 8, 7):
        invitations.take(invitation(run_id))
    clock.now = 200.0
    messages = invitations.drop()
    assert [message.metadata.run_id for message in messages] == [7, 8]
    assert invitations.due() is None


# Drift, with given losses.


def look(invitations: Invitations, loss: float, stamp: tuple[int, int, int] | None = None) -> bool:
    """Let the device measure a loss; return whether it trains at once."""
    held = invitations.due()
    assert held is not None
    assert held.looks
    invitations.decide_by_loss(held, loss, stamp)
    now = invitations.due()
    return now is not None and not now.looks


def drifting(loss: float = 1.0) -> tuple[Invitations, Clock]:
    """A device that has trained once, and has a new invitation."""
    invitations, clock = holding("drift=12.5%")
    invitations.take(invitation())
    held = invitations.due()
    assert held is not None
    assert not held.looks
    invitations.accept(held)
    invitations.trained(7, loss, (1, 1, 1))
    invitations.take(invitation())
    return invitations, clock


@pytest.mark.parametrize(("loss", "trains"), [(1.0, False), (1.125, False), (1.126, True)])
def test_a_device_trains_when_its_loss_has_risen_by_more_than_the_share(
    loss: float, trains: bool
) -> None:
    invitations, clock = drifting(loss=0.1)
    assert not look(invitations, 1.0, (1, 1, 1))
    assert invitations.next_in() == 10.0
    clock.now += 10.0
    assert look(invitations, loss, (1, 1, 1)) is trains


def test_a_loss_that_rises_slowly_is_compared_with_the_lowest() -> None:
    invitations, clock = drifting()
    trains = []
    for loss in (2.0, 1.0, 1.0625, 1.126):
        trains.append(look(invitations, loss, (1, 1, 1)))
        clock.now += 10.0
    assert trains == [False, False, False, True]


def test_data_that_were_replaced_since_the_training_are_compared_with_it() -> None:
    assert look(drifting(loss=1.0)[0], 1.5, (2, 1, 1))
    assert not look(drifting(loss=1.4)[0], 1.5, (2, 1, 1))
    assert not look(drifting(loss=1.0)[0], 1.5, (1, 1, 1))
    # Without a training loss, the first measured loss is the reference.
    invitations, clock = drifting(loss=math.nan)
    assert not look(invitations, 1.5, (2, 1, 1))
    clock.now += 10.0
    assert look(invitations, 1.8, (2, 1, 1))


def test_an_interrupted_training_is_still_due() -> None:
    invitations, _ = drifting()
    invitations.failed(7)
    invitations.take(invitation())
    held = invitations.due()
    assert held is not None
    assert not held.looks


def test_after_five_failed_measurements_the_device_trains() -> None:
    invitations, clock = drifting()
    for loss in (*[math.nan] * 4, 1.0, *[math.nan] * 5):
        assert not look(invitations, loss)
        clock.now += 10.0
    held = invitations.due()
    assert held is not None
    assert not held.looks


# With a ClientApp.


class Wire(Link):
    """A link that keeps replies; all runs use the same app bundle."""

    def __init__(self, data: bytes, run: Run) -> None:
        self.node_id = 5
        self.sent: list[Message] = []
        self._data, self._run = data, run

    def send(self, reply: Message, seconds: float) -> None:
        self.sent.append(reply)

    def run(self, run_id: int) -> Run:
        return self._run

    def bundle(self, run: Run) -> bytes:
        return self._data


class Board:
    """A device with Raceme's ClientApp and a data file, and its link."""

    def __init__(self, folder: Path, apps: Apps, when: str, grace: float = 5.0) -> None:
        self.path = folder / "own.npz"
        write_device(self.path)
        config = RunConfig(dataset="npz", model="mclr", lr=0.1)
        config = config.with_values(data_file=str(self.path))
        keys = "\n".join(f"{key} = '{value}'" for key, value in config.to_mapping().items())
        data = bundle(pyproject=project("raceme", "raceme", package.__version__, keys))
        self.wire = Wire(data, announced(data, "raceme/raceme", package.__version__))
        self.arrays = models.initial_arrays(config)
        self.clock = Clock()
        self.interrupter = Interrupter(grace)
        node = {"device-id": "kitchen", "data-file": str(self.path)}
        self.invitations = Invitations(parse_when(when), self.clock, Middle())
        self.tasks = TaskRunner(apps, node, self.interrupter, self.invitations)

    def receive(self, kind: str = "train", **settings: object) -> None:
        """Take in a message, as if from the SuperLink."""
        identify_process(7)
        config = ConfigRecord(dict(settings))  # type: ignore[arg-type]
        whole = RecordDict({"arrays": self.arrays, "config": config})
        message, head = (Message(content, 5, kind) for content in (whole, RecordDict()))
        set_message_id(message, "m")
        self.tasks.answer(self.wire, head, lambda: message)

    def follow(self, seconds: float) -> bool:
        """Let time pass, and let the device act on a due invitation."""
        self.clock.now += seconds
        return self.tasks.handle_due_invitation(self.wire)

    def replace_data(self, change: Callable[[np.ndarray], np.ndarray]) -> None:
        """Replace the labels of the data file."""
        with np.load(self.path) as archive:
            arrays = dict(archive)
        arrays["y_train"] = change(arrays["y_train"])
        other = self.path.with_suffix(".new.npz")
        np.savez(other, **arrays)
        os.replace(other, self.path)


@pytest.fixture
def apps() -> Apps:
    with closing(Apps()) as opened:
        yield opened  # type: ignore[misc]


def test_other_messages_are_answered_while_an_invitation_waits(tmp_path: Path, apps: Apps) -> None:
    board = Board(tmp_path, apps, "interval=60s")
    board.receive(invitation=True, task=1, version=4)
    assert board.wire.sent == []
    board.receive("evaluate")
    board.receive("train", task=2)
    assert [reply.metadata.message_type for reply in board.wire.sent] == ["evaluate", "train"]
    assert not board.follow(29.0)
    assert board.follow(1.0)
    reply = board.wire.sent[-1]
    assert reply.content["config"] == ConfigRecord({"task": 1, "version": 4})
    assert "arrays" in reply.content
    assert not board.follow(600.0)


def test_a_device_that_accepts_at_once_answers_an_invitation_like_any_work(
    tmp_path: Path, apps: Apps
) -> None:
    board = Board(tmp_path, apps, "at-once")
    board.receive(invitation=True, task=1)
    assert len(board.wire.sent) == 1
    assert not board.wire.sent[0].has_error()


def test_a_device_trains_again_when_its_data_were_replaced_by_others(
    tmp_path: Path, apps: Apps
) -> None:
    board = Board(tmp_path, apps, "drift=10%")
    board.receive(invitation=True, task=1)
    assert board.follow(0.0)
    assert len(board.wire.sent) == 1
    # The trained model fits the labels, and is sent back with the next task.
    for _ in range(30):
        board.arrays = board.wire.sent[-1].content.array_records["arrays"]
        board.receive("train", task=2)
    board.arrays = board.wire.sent[-1].content.array_records["arrays"]
    board.receive(invitation=True, task=3)
    replies = len(board.wire.sent)
    for _ in range(3):
        assert board.follow(10.0)
        assert not board.follow(0.0)
    assert len(board.wire.sent) == replies
    board.replace_data(lambda labels: (labels + 1) % 3)
    assert not board.follow(9.0)
    assert board.follow(1.0)
    assert board.follow(0.0)
    assert len(board.wire.sent) == replies + 1
    assert board.wire.sent[-1].content["config"] == ConfigRecord({"task": 3})


def test_an_unreadable_file_is_read_again_later(
    tmp_path: Path, apps: Apps, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("raceme"), "propagate", True)
    board = Board(tmp_path, apps, "drift")
    board.receive(invitation=True, task=1)
    board.follow(0.0)
    board.receive(invitation=True, task=2)
    board.follow(0.0)
    whole = board.path.read_bytes()
    board.path.write_bytes(whole[:100])
    board.follow(10.0)
    assert "the loss could not be measured" in caplog.text
    board.path.write_bytes(whole)
    assert board.follow(10.0)
    assert len(board.wire.sent) == 1


def test_a_device_that_stops_returns_its_invitations(tmp_path: Path, apps: Apps) -> None:
    board = Board(tmp_path, apps, "interval=60s")
    board.receive(invitation=True, task=1)
    board.tasks.return_invitations(board.wire)
    (reply,) = board.wire.sent
    assert reply.error.reason == "the device is shutting down"
    assert reply.error.code == NODE_UNAVAILABLE
    assert board.invitations.next_in() == math.inf


def test_an_ended_training_is_repeated(tmp_path: Path, apps: Apps) -> None:
    board = Board(tmp_path, apps, "drift", grace=0.0)
    board.receive(invitation=True, task=1)
    assert board.follow(0.0)
    board.receive(invitation=True, task=2)
    assert board.follow(0.0)
    # The next measurement shows a higher loss; then the device is told to stop.
    board.clock.now += 10.0
    held = board.invitations.due()
    assert held is not None
    board.invitations.decide_by_loss(held, 99.0, None)
    board.interrupter.stop()
    assert board.follow(0.0)
    assert board.wire.sent[-1].has_error()
    board.receive(invitation=True, task=3)
    held = board.invitations.due()
    assert held is not None
    assert not held.looks


FOREIGN = """
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
LOSSES = iter([1.0, 1.05, 1.2])


@app.train()
def train(message, context):
    return Message(RecordDict({"m": MetricRecord({"n": len(context.state)})}), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    context.state["seen"] = MetricRecord({"n": 1})
    metrics = {"eval-loss": next(LOSSES)} if STATES else {"n": 1}
    return Message(RecordDict({"m": MetricRecord(metrics)}), reply_to=message)
"""


@pytest.mark.parametrize(("states", "looks"), [(True, 3), (False, 1)])
def test_another_clientapp_is_asked_to_evaluate(
    tmp_path: Path, apps: Apps, states: bool, looks: int
) -> None:
    board = Board(tmp_path, apps, "drift=10%")
    data = bundle(FOREIGN + f"\nSTATES = {states}\n")
    board.wire = Wire(data, announced(data))
    for task in (1, 2):
        board.receive(invitation=True, task=task)
        board.follow(0.0)
    # A client that reports no loss trains, since a drift could not be detected.
    for _ in range(looks - 1):
        assert not board.follow(0.0)
        assert board.follow(10.0)
    assert board.follow(0.0)
    assert len(board.wire.sent) == 2
    # Measuring does not change the client's state.
    assert board.wire.sent[-1].content["m"] == MetricRecord({"n": 0})
