"""Hostile clients: spoiled replies to every kind of work, against every method."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from raceme.client_app import app as honest
from raceme.core import events
from raceme.core.config import RunConfig
from raceme.core.events import Event
from raceme.core.registry import STRATEGIES
from raceme.records.folder import log_file
from raceme.records.store import RunStore
from raceme.reporting.run_page import run_page
from raceme.runs.experiment import (
    build_grid,
    build_strategy,
    execute,
    plan,
    resolve,
    training_settings,
)
from raceme.simulation import VirtualGrid
from raceme.strategies import Method
from raceme.training.clients import probe_of, starts_of
from raceme.training.models import initial_arrays

_FORGED = "\x1b[31m\n2026 INFO forged\u202e\x9b\u2028\x00\ud800"
_NAMES = ["version", "task", "kind", "step", "chosen", "unit", "client-id", "other"]
_METRICS = ["num-examples", "train-loss", "loss", "accuracy", "mae", "group", "accuracy-before"]
_METRICS += ["accuracy-after", "sample-passes", "started-at", "finished-at", "num-test-examples"]
_NUMBERS: list[float] = [0, -1, 1, 1e9, 1e18, 2**53, 2**62, 1.7e308, -1.7e308, 5e-324, 3.5e38]
_NUMBERS += [math.nan, math.inf, -math.inf, 0.5]
_CLIENTS, _ATTACKERS = 6, 2

_CONTINUAL = {"partition": "iid", "drift": "tasks"}
_KEYS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("apd", "ewc", "fedweit", "ssgd"), _CONTINUAL),
    "c-faacl": {"partition": "iid", "drift": "scenario-stream", "scenario": "s2"},
    "cdfl": {
        **{"partition": "rotation-groups", "groups": 2, "drift": "mixture"},
        **{"proxy": "20", "pretrain": 20, "pretrain-epochs": 1},
    },
}
"""Keys that methods need; some methods are also played with changing data."""


def _value(rng: random.Random) -> Any:
    """Return a random value for a setting."""
    return rng.choice(
        [
            lambda: rng.choice(_NUMBERS[:7]),
            lambda: rng.choice(_NUMBERS[7:]),
            lambda: int(rng.choice([-1, 0, 1, 7, 2**40, -(2**62)])),
            lambda: _FORGED.replace("\ud800", ""),
            lambda: "x" * rng.choice([0, 1, 100_000]),
            lambda: _FORGED.encode("utf-8", "replace"),
            lambda: [1] * rng.choice([0, 3, 10_000]),
            lambda: ["a\x1b"] * 3,
            lambda: rng.random() < 0.5,
        ]
    )()


def _array(rng: random.Random, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return an array of the given shape or of another one, with random content."""
    shape = rng.choice([shape, shape, shape, (), (0,), (*shape, 1), shape[:-1], (3, 2)])
    dtype = np.dtype(rng.choice([dtype.str, dtype.str, "f4", "f8", "f2", "i8", "u8", "u1", "b1"]))
    if dtype.kind in "iu":
        most = np.iinfo(dtype)
        fill: float = rng.choice([0, 1, most.max, most.min, most.max // 2])
    else:
        fill = rng.choice([*_NUMBERS, 3.4e38, -3.4e38, 1e15, 1e-40])
    with np.errstate(all="ignore"):
        values = np.full(shape, fill).astype(dtype)
    if values.size and rng.random() < 0.5:
        values.flat[rng.randrange(values.size)] = 0
    return values


def _metric(content: RecordDict, rng: random.Random) -> None:
    name = rng.choice([*_METRICS, _FORGED.replace("\ud800", ""), "y" * 1000])
    record = next(iter(content.metric_records.values()), None)
    if record is not None:
        record[name] = rng.choice([*_NUMBERS, [1.0, math.nan], [0.5, 0.5], 2**40])


def _setting(content: RecordDict, rng: random.Random) -> None:
    record = content.config_records.get("config", ConfigRecord())
    content["config"] = ConfigRecord({**record, rng.choice(_NAMES): _value(rng)})


def _arrays(content: RecordDict, rng: random.Random) -> None:
    records = list(content.array_records.items())
    if not records:
        return
    name, record = rng.choice(records)
    arrays = dict(record)
    key = rng.choice(list(arrays)) if arrays else ""
    how = rng.randrange(7)
    if how == 0 or not arrays:
        arrays = {f"{index}{_FORGED[:9]}": Array(np.zeros(1)) for index in range(3000)}
    elif how == 1:
        del arrays[key]
    elif how == 2:
        arrays = {key + "\x1b" if k == key else k: v for k, v in arrays.items()}
    elif how == 3:
        junk = bytes(rng.randrange(256) for _ in range(rng.choice([0, 9, 60, 200])))
        data = rng.choice([junk, arrays[key].data[:-1], b"\x93NUMPY\x01\x00" + junk])
        arrays[key] = Array("float32", (1,), "numpy.ndarray", data)
    else:
        values = arrays[key].numpy()
        arrays[key] = Array(_array(rng, values.shape, values.dtype))
    content[name] = ArrayRecord(arrays)


def _scaled(content: RecordDict, rng: random.Random) -> None:
    factor = rng.choice([-1.0, 1e3, -1e6, 1e15, 3e38, 0.0])
    for name, record in content.array_records.items():
        with np.errstate(all="ignore"):
            arrays = {k: (v.numpy() * np.float32(factor)).astype("f4") for k, v in record.items()}
        content[name] = ArrayRecord({k: Array(v) for k, v in arrays.items()})


def _records(content: RecordDict, rng: random.Random) -> None:
    name = rng.choice(["arrays", "numbers", "metrics", "config", "x" * 300, "arrays-0"])
    records = [ArrayRecord(), MetricRecord(), ConfigRecord()]
    records.append(ArrayRecord({"losses": Array(_array(rng, (3, 4), np.dtype("f4")))}))
    if rng.random() < 0.3 and name in content:
        del content[name]
    else:
        content[name] = rng.choice(records)


_SPOILS: list[Callable[[RecordDict, random.Random], None]] = [
    *(_metric, _setting, _arrays, _scaled, _records),
]


def spoiled(reply: Message, rng: random.Random) -> Message:
    """Return a hostile client's replacement of a reply."""
    how = rng.random()
    if how < 0.1:
        return reply
    if how < 0.2:
        reason = rng.choice(["", _FORGED, "x" * 10**6, "No query function registered"])
        code = rng.choice([0, 1, 2, 100, 2**31 - 1])
        reply.__dict__.update(_content=None, _error=Error(code, reason))
        return reply
    if not reply.has_error():
        for _ in range(rng.choice([1, 1, 2, 4])):
            rng.choice(_SPOILS)(reply.content, rng)
    return reply


def hostile_app(rng: random.Random) -> ClientApp:
    """Return Raceme's ClientApp, of which some clients send hostile answers."""
    made = ClientApp()
    greets = rng.random() < 0.3

    def respond(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        attacks = int(context.node_config["partition-id"]) < _ATTACKERS
        is_greeting = message.metadata.message_type == "query" and not message.content
        return spoiled(reply, rng) if attacks and (greets or not is_greeting) else reply

    made.train()(respond)
    made.evaluate()(respond)
    made.query()(respond)
    return made


def _prepare(subject: str, rng: random.Random, folder: Path) -> tuple[RunConfig, Method, Grid]:
    """Make a run whose clients are partly hostile."""
    keys = {
        **{"strategy": subject, "dataset": "digits", "clients": _CLIENTS, "model": "mclr"},
        **{"workers": "0", "max-updates": 24, "eval-every": 6, "seed": rng.randrange(1000)},
        **{"devices": rng.choice(["uniform", "slow30x10"]), "out": str(folder / "run")},
        **_KEYS.get(subject, {}),
    }
    if subject not in _KEYS and rng.random() < 0.3:
        keys |= {"drift": "swap-all", "drift-at": "3s"}
    config = resolve(RunConfig.from_mapping(keys))
    method, app = build_strategy(config), hostile_app(rng)
    nodes = build_grid(config, method).nodes
    return config, method, VirtualGrid(app, nodes, config.to_mapping(), config.seed)


def attack(subject: str, rng: random.Random, folder: Path) -> None:
    """Run a method with hostile clients; check the results except for plots."""
    config, method, grid = _prepare(subject, rng, folder)
    seen, run = list[Event](), folder / "run"
    run.mkdir()
    initial = initial_arrays(config)

    def observe(event: Event) -> None:
        seen.append(event)
        store.observe(event)

    with RunStore(run) as store, log_file(run / "run.log"):
        method.run(
            grid,
            initial,
            config.max_updates or 0,
            timeout=config.task_timeout,
            train_config=training_settings(config),
            plan=plan(config),
            observe=observe,
            probe=probe_of(config, initial),
            starts=starts_of(config, initial),
        )
    method.load_state_dict(method.state_dict())
    check(method, seen, run)


def attack_pages(subject: str, rng: random.Random, folder: Path) -> None:
    """Run a method with hostile clients, and make all plots and the page."""
    config, method, grid = _prepare(subject, rng, folder)
    seen = list[Event]()
    outcome = execute(config, method, grid, seen.append)
    assert not outcome.unwritten, outcome.unwritten
    check(method, seen, outcome.out)
    page = run_page(outcome.out, "")
    assert "\x1b" not in page
    assert "<script>alert" not in page


def check(method: Any, seen: list[Event], run: Path) -> None:
    """Check the results of a run with hostile clients."""
    (ended,) = [event for event in seen if isinstance(event, events.RunEnded)]
    assert ended is seen[-1]
    for cluster, model in method.models.items():
        assert np.isfinite(model.vector).all(), f"cluster {cluster} is not finite"
    for event in seen:
        if isinstance(event, events.UpdateRejected):
            assert event.reason.isprintable(), event.reason
            assert len(event.reason) <= 300, len(event.reason)
        if isinstance(event, events.ClientJoined):
            assert event.client.isprintable()
        if isinstance(event, events.Evaluated):
            assert 0 <= event.accuracy <= 1, event.accuracy
            assert not math.isfinite(event.loss) or abs(event.loss) <= 3.5e38, event.loss
    applied = [event for event in seen if isinstance(event, events.UpdateApplied)]
    assert all(math.isfinite(event.weight) for event in applied)
    lines = (run / "run.log").read_text(encoding="utf-8").split("\n")
    assert all(line.isprintable() for line in lines), "a log line is not printable"
    assert max(map(len, lines)) < 2500
    assert (run / "run.sqlite").stat().st_size < 4_000_000


SUBJECTS = tuple(STRATEGIES)
