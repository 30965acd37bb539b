"""Clients that report impossible values: effects on a run's events, log, store and pages."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest
from fleets import grid_of, pulled_app
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from runs import ONES, devices, half, of, run

from raceme.core import events
from raceme.core.messages import LARGEST
from raceme.records.folder import log_file
from raceme.simulation import VirtualGrid

FORGED = "\x1b[31mred\x1b[0m\n2026-11-23 INFO forged \u202ebackwards \x9b \u2028"
HUGE = "x" * 30_000_000


def stating(app: ClientApp, spoiled: int, **stated: object) -> ClientApp:
    """Let one client report other values when it tests; names that begin with _ are settings."""
    outer = ClientApp()

    @outer.query()
    def query(message: Message, context: Context) -> Message:
        return app(message, context)

    @outer.train()
    def train(message: Message, context: Context) -> Message:
        return app(message, context)

    @outer.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        reply = app(message, context)
        if int(context.node_config["partition-id"]) == spoiled:
            for name, value in stated.items():
                record = "config" if name in ("unit", "step") else "metrics"
                reply.content[record][name.replace("_", "-")] = value
        return reply

    return outer


def grid_with(spoiled: int = 0, clients: int = 5, **stated: object) -> VirtualGrid:
    """Return a fleet of which one client (none: -1) reports other values when it tests."""
    app = stating(pulled_app([ONES] * clients), spoiled, **stated)
    return grid_of(app, devices(*[1.0] * clients))


@pytest.mark.parametrize(
    ("stated", "why"),
    [
        ({"accuracy": 1e9}, "accuracy is 1e+09"),
        ({"accuracy": 1.0000001}, "from 0 to 1"),
        ({"accuracy": -0.1}, "from 0 to 1"),
        ({"accuracy": math.inf}, "accuracy is inf"),
        ({"accuracy": 1.7e308}, "too large"),
        ({"loss": 1.7e308}, "too large"),
        ({"loss": -1.7e308}, "too large"),
        ({"loss": -math.inf}, "too large"),
        ({"unit": HUGE}, "unit"),
        ({"unit": FORGED[:20]}, "unit"),
        ({"step": 10**12}, "step 1000000000000"),
        ({"step": -1}, "step -1"),
        ({"step": FORGED}, "step"),
    ],
)
def test_an_impossible_test_result_is_refused_and_counted(
    stated: dict[str, object], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    method = half()
    seen = run(method, grid_with(**stated), num_rounds=3)
    tests = of(events.Evaluated, seen)
    assert all(0 <= test.accuracy <= 1 and abs(test.loss) <= LARGEST for test in tests)
    assert all(set(test.per_client) == {"c1", "c2", "c3", "c4"} for test in tests)
    refused = of(events.UpdateRejected, seen)
    assert len(refused) == len(tests) == method.progress.rejected
    assert {event.client for event in refused} == {"c0"}
    assert all(why in event.reason and len(event.reason) <= 300 for event in refused)
    assert all(event.reason.isprintable() for event in refused)
    assert all(len(line) < 500 for line in caplog.text.splitlines())


@pytest.mark.parametrize("loss", [math.nan, math.inf, LARGEST, -1.0, 0.0])
def test_possible_test_results_are_accepted(loss: float) -> None:
    seen = run(half(), grid_with(loss=loss), num_rounds=2)
    assert of(events.UpdateRejected, seen) == []
    assert all(len(test.per_client) == 5 for test in of(events.Evaluated, seen))


def test_the_largest_accepted_losses_have_a_finite_mean() -> None:
    app = pulled_app([ONES] * 4)
    for index in range(4):
        app = stating(app, index, loss=LARGEST)
    seen = run(half(), grid_of(app, devices(1.0, 1.0, 1.0, 1.0)), num_rounds=2)
    assert [test.loss for test in of(events.Evaluated, seen)] == pytest.approx([LARGEST] * 2)


def test_one_client_does_not_turn_accuracies_into_errors() -> None:
    seen = run(half(), grid_with(unit="m", mae=0.0), num_rounds=2)
    for test in of(events.Evaluated, seen):
        assert not test.measure.is_error
        assert set(test.per_client) == {"c1", "c2", "c3", "c4"}


def test_one_client_does_not_end_a_run_at_its_target() -> None:
    seen = run(
        half(), grid_with(accuracy=1e9), num_rounds=4, target_accuracy=0.999, stop_at_target=True
    )
    assert of(events.RunEnded, seen)[0].reason != "target"
    assert of(events.RunEnded, seen)[0].updates == 4


def test_test_samples_beyond_belief_do_not_make_the_weighted_accuracy() -> None:
    honest = run(half(), grid_with(-1), num_rounds=2)
    lying = run(half(), grid_with(num_examples=2**52, accuracy=0.0), num_rounds=2)
    for before, now in zip(of(events.Evaluated, honest), of(events.Evaluated, lying), strict=True):
        # It counts for ten times the median, 50 of 70 samples.
        assert now.weighted_accuracy == pytest.approx(before.weighted_accuracy * 20 / 70)


# Training replies.


def arrays(reply: Message) -> None:
    reply.content["arrays"] = ArrayRecord(
        {f"{FORGED}{index}": Array(np.zeros(1, np.float32)) for index in range(10_000)}
    )


def setting(name: str, value: object) -> object:
    def spoil(reply: Message) -> None:
        config = dict(reply.content["config"])
        reply.content["config"] = ConfigRecord({**config, name: value})

    return spoil


def metric(name: str, value: float) -> object:
    def spoil(reply: Message) -> None:
        reply.content["metrics"][name] = value

    return spoil


def dtype(reply: Message) -> None:
    values = np.zeros(4, [("\x1b[31m" * 20, "f4")])
    data = dict(reply.content["arrays"])
    reply.content["arrays"] = ArrayRecord({**data, "w": Array(values)})


def header(reply: Message) -> None:
    junk = b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '\x1b[31m" + b"\x9b" * 110
    data = dict(reply.content["arrays"])
    data["w"] = Array("float32", (4,), "numpy.ndarray", junk)
    reply.content["arrays"] = ArrayRecord(data)


def numbers(values: np.ndarray, count: int = 1, name: str = "n") -> object:
    def spoil(reply: Message) -> None:
        reply.content["numbers"] = ArrayRecord(
            {f"{name}{index}": Array(values) for index in range(count)}
        )

    return spoil


SPOILED = {
    "10,000 array names": arrays,
    "version": setting("version", FORGED),
    "huge version": setting("version", HUGE),
    "huge task": setting("task", HUGE.encode()),
    "kind": setting("kind", FORGED),
    "long list": setting("step", list(range(100_000))),
    "train loss": metric("train-loss", 1.7e308),
    "examples": metric("num-examples", 1e18),
    "infinite examples": metric("num-examples", math.inf),
    "metric name": metric(FORGED, 1.0),
    "dtype": dtype,
    "header": header,
    "large numbers": numbers(np.full(3, 1e300)),
    "half-size infinity": numbers(np.full(3, np.inf, np.float16)),
    "name of numbers": numbers(np.full(3, np.nan), name=FORGED * 50),
    "many numbers": numbers(np.zeros(1), count=2000),
}


@pytest.mark.parametrize("name", SPOILED)
def test_an_impossible_reply_is_reported_in_one_short_printable_line(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(reply: Message, index: int) -> Message:
        if index == 0:
            SPOILED[name](reply)  # type: ignore[operator]
        return reply

    app = pulled_app([ONES] * 3, change=spoil)
    with caplog.at_level(logging.DEBUG):
        seen = run(half(), grid_of(app, devices(1.0, 1.0, 1.0)), num_rounds=4)
    refused = of(events.UpdateRejected, seen)
    assert refused
    assert {event.client for event in refused} == {"c0"}
    assert all(event.reason.isprintable() and len(event.reason) <= 300 for event in refused)
    assert all(line.isprintable() and len(line) < 500 for line in caplog.text.splitlines())
    assert all(update.client != "c0" for update in of(events.UpdateApplied, seen))


def test_errors_of_megabytes_and_escapes_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def fails(reply: Message, index: int) -> Message:
        if index == 0:
            raise OSError(FORGED + HUGE)
        return reply

    app = pulled_app([ONES] * 3, change=fails)
    seen = run(half(), grid_of(app, devices(1.0, 1.0, 1.0)), num_rounds=4)
    refused = of(events.UpdateRejected, seen)
    assert refused
    assert all(event.reason.isprintable() and len(event.reason) <= 300 for event in refused)
    assert all(len(line) < 500 for line in caplog.text.splitlines())


@pytest.mark.parametrize("stated", ["", FORGED, HUGE, b"\x1b", 1.5, ["a"], "a\u202eb"])
def test_a_client_without_a_decent_name_is_refused_in_a_short_line(
    stated: object, caplog: pytest.LogCaptureFixture
) -> None:
    inner, app = pulled_app([ONES] * 2), ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        reply = inner(message, context)
        if int(context.node_config["partition-id"]) == 0:
            metrics = MetricRecord({"num-examples": 10})
            records = {"metrics": metrics, "config": ConfigRecord({"client-id": stated})}
            return Message(RecordDict(records), reply_to=message)
        return reply

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return inner(message, context)

    seen = run(half(), grid_of(app, devices(1.0, 1.0)), num_rounds=2)
    assert {event.client for event in of(events.ClientJoined, seen)} == {"c1"}
    assert all(len(event.reason) < 300 for event in of(events.UpdateRejected, seen))
    assert all(line.isprintable() and len(line) < 500 for line in caplog.text.splitlines())


def test_hostile_statements_are_not_written_to_the_log_file(tmp_path: Path) -> None:
    with log_file(tmp_path / "run.log"):
        logging.getLogger("raceme").setLevel(logging.INFO)
        logging.getLogger("raceme").warning("it says: %s", FORGED + HUGE)
    text = (tmp_path / "run.log").read_text()
    assert len(text) < 3000
    assert text.removesuffix("\n").isprintable()
