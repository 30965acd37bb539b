"""Show that a change of the code changes no results: hashes of runs, keys, suites and results.

``write`` runs every registered method on the digits, and further runs of each feature, and writes
a JSON file with SHA-256 hashes (the first 96 bits) of final models and events, all keys with
their defaults, and hashes of the expansion of every suite and of the configurations under
``docs/results``. ``compare`` prints what differs between two such files, one line each::

    python benchmarks/equivalence.py write after.json --workers 2
    python benchmarks/equivalence.py compare benchmarks/equivalence.json after.json

``compare`` exits with 1 if anything differs. A file holds the fingerprint of the platform that
made it, as floating-point results are the same bits on equal processors and equal versions of
torch and numpy only; hashes of runs of another platform are not compared, and ``compare`` says so.

What is hashed:

- ``models``: the weights of all clusters, by cluster id; with ``client-models`` also those of the
  clients;
- ``essential``, and its parts: for each applied update time, client, cluster, staleness and weight;
  for each evaluation time and the clients' scores; changes of membership; joins and leaves;
  rejections; the end. This is what every redesign has to keep;
- one hash per kind of event, over the values of its fields. Names of classes and fields are not
  hashed: a renamed class is mapped by ``RENAMED``, a renamed word by ``WORDS``;
- ``texts``: the texts for users in events, separately, since wording may change.

All imports from Raceme and all names of the present code are in the first section.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.numpy import load_file

from raceme.core.config import RunConfig, all_keys, read_toml
from raceme.core.registry import STRATEGIES
from raceme.experiments.suites import Suite, all_shipped, load_suite
from raceme.runs.experiment import simulate

# The present names: to be adapted when code is renamed, so that hashes stay comparable.

RENAMED: dict[str, str] = {"Measured:idle": "ClientIdled", "Measured:support": "SupportChanged"}
"""Present names of events, mapped to those in the committed file.

An event ``Measured`` is named after its measure: ``{"Measured:idle": "ClientIdled"}``.
"""
WORDS: dict[str, str] = {}
"""Present words in events, mapped to those in the committed file."""
KEYS: dict[str, str] = {
    **{f"{name}.sampling": f"{name}.picking" for name in STRATEGIES},
}
"""Present keys of a run, mapped to those in the committed file."""
_WINDOWED = ("csafl", "t-fedavg", "ta-fedavg", "g-fedavg", "ga-fedavg", "r-fedavg", "nog-fedavg")
NEW_KEYS: frozenset[str] = frozenset(
    {"weight-decay-on", "discrepancy", "labels", "where", "own-model", "upload", "augment"}
    | {"features", "ifca.detect", "fair", "attackers-seconds"}
    | {f"{name}.{key}" for name in ("flexcfl", "fedgroup") for key in ("inter-group", "placing")}
    | {f"{name}.{key}" for name in _WINDOWED for key in ("stale", "unfinished")}
    | {
        f"{name}.{key}"
        for name in ("flexcfl", "fedgroup", "flexcfl-async")
        for key in ("start", "distance")
    }
    | {"flexcfl.paper", "fedgroup.paper", "fedasync.rho", "fedasync.first-staleness"}
    | {"cfl.gamma-max", "cfl-async.gamma-max"}
)
"""Keys that the committed file does not have: they are left out of configurations."""
REMOVED_KEYS: dict[str, Any] = {"never-across": "", "together": "", "trace": False}
"""Keys that only the committed file has, with their defaults, which are added to configurations."""
REMOVED_OF_SUITES: dict[str, Any] = {"shows_forgetting": False}
"""Values of a suite that only the committed file has."""
NEW_FIELDS = {("ClientJoined", "labels")}
"""Fields that events in the committed file do not have: they are left out of hashes."""

TEXTS = ("reason",)
"""Fields of events with text for users."""
WALL_CLOCK = ("started_at", "finished_at", "cpu_seconds", "wall_time")
"""Fields of events that a simulated run leaves empty, or that differ from run to run."""


def described(event: Any) -> tuple[str, dict[str, Any]]:
    """Return the kind of an event, as the committed file names it, and its fields."""
    kind = type(event).__name__
    if kind == "Measured":
        name = f"Measured:{event.name}"
        # In the committed file, idle times have no number of updates.
        number = {} if event.name == "idle" else {"updates": event.updates}
        return RENAMED.get(name, name), {"time": event.time, **number, **event.values}
    names = [item.name for item in fields(event) if (kind, item.name) not in NEW_FIELDS]
    return RENAMED.get(kind, kind), {name: getattr(event, name) for name in names}


def essential(kind: str, of: Mapping[str, Any]) -> tuple[str, tuple[Any, ...]] | None:
    """Return the part of the essential stream that an event belongs to, and its hashed values."""
    match kind:
        case "UpdateApplied":
            names = ("time", "client", "cluster", "staleness", "weight")
            return "updates", tuple(of[name] for name in names)
        case "Evaluated":
            scores = {client: tuple(score) for client, score in of["per_client"].items()}
            return "evaluations", (of["time"], scores)
        case "ClustersChanged":
            return "memberships", (of["time"], of["memberships"])
        case "ClientJoined":
            return "fleet", (of["time"], "joined", of["client"])
        case "ClientLeft":
            return "fleet", (of["time"], "left", of["client"])
        case "UpdateRejected":
            return "rejections", (of["time"], of["client"])
        case "RunEnded":
            return "end", (of["updates"],)
    return None


class Ran(NamedTuple):
    """The result of a run.

    Attributes
    ----------
    models : dict[str, dict[str, list[Any]]]
        The arrays of each model, by kind (clusters, clients) and by id or name.
    summary : dict[str, Any]
        The content of its summary.
    """

    models: dict[str, dict[str, list[Any]]]
    summary: dict[str, Any]


def run(
    settings: Mapping[str, Any], out: Path, observe: Callable[[Any], None], stop: Callable[[], str]
) -> Ran:
    """Run a configuration into a folder, or resume the run in it, and return its results."""
    keys = dict(settings)
    if (out / "config.toml").exists():
        keys = {**read_toml(out / "config.toml"), "resume": str(out), "out": ""}
    else:
        keys["out"] = str(out)
    outcome = simulate(RunConfig.from_mapping(keys), observe, stop=stop)
    if outcome.unwritten:
        raise RuntimeError(f"not written: {outcome.unwritten}")
    models = {
        kind: {path.stem: _arrays(path) for path in sorted((out / kind).glob("*.safetensors"))}
        for kind in ("clusters", "clients")
    }
    return Ran(models, outcome.summary)


def keys_with_defaults() -> dict[str, Any]:
    """Return every key of a run with its default."""
    return {name: key.default for name, key in all_keys().items()}


def suites() -> Iterator[tuple[str, Suite]]:
    """Yield every shipped suite with its name."""
    for name, variants in sorted(all_shipped().items()):
        for variant, path in sorted(variants.items()):
            yield f"{name}.{variant}", load_suite(path)


def suite_runs(suite: Suite) -> Iterator[dict[str, Any]]:
    """Yield the runs that a suite may lead to: plain ones, trials of sweeps, and their points."""
    for method in suite.methods:
        trials = suite.seeds[:1] if method.is_swept else ()
        for point in method.variants():
            for seed, trial in [*((s, False) for s in suite.seeds), *((s, True) for s in trials)]:
                yield {
                    "label": point.label,
                    "method": method.label,
                    "seed": seed,
                    "trial": trial,
                    "config": suite.config(point, seed, trial).to_mapping(),
                    "published": [vars(row) for row in point.published],
                }


def suite_shown(suite: Suite) -> dict[str, Any]:
    """Return the parts of a suite other than its runs: title, notes, score, columns."""
    shown = {item.name: getattr(suite, item.name) for item in fields(suite)}
    return shown | REMOVED_OF_SUITES | {"methods": ()}


def result_configurations(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the configuration of every run under ``docs/results``."""
    for path in sorted(folder.glob("*.json")):
        tree = json.loads(path.read_text(encoding="utf-8"))
        for row in tree["rows"]:
            keys = {**tree["shared"]["configuration"], **row["configuration"], "seed": row["seed"]}
            # Skip options that a method does not have.
            yield RunConfig.from_mapping(keys, lenient=True).to_mapping()


# Canonical hashes.

_DIGITS = 24
"""Hexadecimal digits of a SHA-256 that are kept."""


def canonical(value: Any) -> str:
    """Serialise a value, so that equal values give equal text whatever their containers."""
    match value:
        case Enum():
            return canonical(value.value)
        case bool() | np.bool_():
            return str(bool(value))
        case None:
            return "None"
        case str():
            return repr(WORDS.get(value, value))
        case int() | np.integer():
            return repr(int(value))
        case float() | np.floating():
            return repr(float(value))
        case np.ndarray():
            return f"{value.dtype}{value.shape}{value.tobytes().hex()}"
        case Mapping():
            items = sorted((canonical(key), canonical(item)) for key, item in value.items())
            return "{" + ",".join(f"{key}:{item}" for key, item in items) + "}"
        case set() | frozenset():
            return "{" + ",".join(sorted(map(canonical, value))) + "}"
        case list() | tuple():
            return "(" + ",".join(map(canonical, value)) + ")"
    if is_dataclass(value):
        return canonical([getattr(value, item.name) for item in fields(value)])
    raise TypeError(f"no canonical form of {type(value).__name__}")


def digest(value: Any) -> str:
    """Return the first 96 bits of the SHA-256 of a value."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:_DIGITS]


def named_as_before(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the key names of the committed file."""
    kept = {KEYS.get(name, name): v for name, v in config.items() if name not in NEW_KEYS}
    return kept | REMOVED_KEYS


class Stream:
    """Collects the events of a run for its hashes."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, dict[str, Any]]] = []
        self._asked = 0

    def observe(self, event: Any) -> None:
        """Take an event in."""
        kind, values = described(event)
        self._seen.append((kind, {k: v for k, v in values.items() if k not in WALL_CLOCK}))

    def stopped(self) -> str:
        """Return the reason to end the run once it has `STOP_AT` updates."""
        self._asked = len(self._seen)
        updates = sum(kind == "UpdateApplied" for kind, _ in self._seen)
        return "stopped" if updates >= STOP_AT else ""

    def forget_end(self) -> None:
        """Forget the events after the last checkpoint, which an uninterrupted run lacks.

        The checkpoint is written at the last check for a reason to end. The events after it are the
        final evaluation and the end of the run.
        """
        del self._seen[self._asked :]

    def hashes(self) -> dict[str, Any]:
        """Return the hashes."""
        kinds: dict[str, list[str]] = {}
        parts: dict[str, list[str]] = {}
        stream, texts = [], []
        for kind, values in self._seen:
            kept = [value for name, value in values.items() if name not in TEXTS]
            kinds.setdefault(kind, []).append(canonical(kept))
            texts += [canonical(values[name]) for name in TEXTS if name in values]
            belongs = essential(kind, values)
            if belongs is not None:
                part, counted = belongs
                parts.setdefault(part, []).append(canonical(counted))
                stream.append(part + canonical(counted))
        return {
            "essential": digest(stream),
            "parts": {part: digest(entries) for part, entries in sorted(parts.items())},
            "events": {kind: digest(entries) for kind, entries in sorted(kinds.items())},
            "counts": {kind: len(entries) for kind, entries in sorted(kinds.items())},
            "texts": digest(texts),
        }


# The runs.

UPDATES = 120
STOP_AT = 60

_BASE: dict[str, Any] = {
    **{"dataset": "digits", "clients": 8, "seed": 0, "max-updates": UPDATES},
    **{"workers": 0, "batch-size": 10},
}
_NEEDS: dict[str, dict[str, Any]] = {
    # The defaults of CASA split later than after 120 updates.
    "casa": {"casa.gamma": 0.05},
    "casa-plus": {"casa-plus.gamma": 0.05},
    "cdfl": {"proxy": "20", "pretrain": 20},
    "fedsoft-async": {"pretrain": 20},
}
"""Keys that methods need to run, or to show their behaviour in so few updates."""

_OPTIONS = """
ace.start=seen aced.clock=sent c-faacl.borrow=losses c-faacl.hierarchical=false
c-faacl.sampling=in-turn casa.staleness-unit=global casa.clustering=false casa.bi-level=false
casa.sketch=16 casa-plus.bi-level=false cfl.linkage=single cfl-async.decay=constant
cfl-async.decay=polynomial cfl-async.linkage=single cfl-gp.criterion=first cfl-gp.profile=sampled
csafl.update=asynchronous csafl.update=synchronous csafl.grouping=random csafl.grouping=none
csafl.mixing=change faacl.hierarchical=false faacl.sampling=in-turn faacl-async.decay=polynomial
fadas.delay-rule=least fadas.delay-rule=none fadas.bias-correction=true fedasync.decay=constant
fedasync.decay=polynomial fedavg.sampling=in-turn feddrift.measure=loss feddrift.start=per-client
feddrift.compare-on=new feddrift.founding=together feddrift-async.measure=loss
feddrift-async.start=per-client feddrift-async.compare-on=new feddrift-async.decay=polynomial
fedgroup.measure=madc fedgroup.newcomers=random fesem.start=k-means++ cdfl.requests=fixed
cdfl.requests=loss cdfl.requests=device cdfl.last-update=this fedsoft.selection=all
fedsoft-async.requests=fixed fedsoft-async.requests=loss fedsoft-async.requests=device
fedsoft-async.last-update=this flexcfl.measure=madc flexcfl.measure=random-clients
flexcfl.detect=direction flexcfl.detect=none flexcfl.newcomers=random flexcfl-async.measure=madc
flexcfl-async.measure=random-clients flexcfl-async.detect=direction flexcfl-async.detect=none
flexcfl-async.decay=polynomial icfl.moves=false icfl.compare=models icfl-async.moves=false
icfl-async.compare=models icfl-async.decay=polynomial ifca.by-examples=true
ifca-async.decay=polynomial pacfl.linkage=maximum pacfl.linkage=minimum port.reference=start
panicle.clustering=false panicle.drift=false
"""
"""Choices of methods that differ from their defaults: each is a run on changing data."""

_CHURN = """
[device]
seconds-per-round = [1.0, 3.0]
jitter = 0.3
drop = 0.05
mean-online = 20.0
mean-offline = 3.0
"""
_SWAP = {"drift": "swap-all", "swap-chance": 1.0, "drift-at": "40 updates, 80 updates"}
_AT = "40 updates, 80 updates"
_TASKS = {"drift": "tasks", "tasks-count": 2, "partition": "iid", "eval-tasks": True}
_STREAM = {"drift": "scenario-stream", "partition": "iid", "scenario": "a1", "stream-steps": 3}
_ROBUST = {"attack": "scale", "attackers": 0.25}


def _special() -> dict[str, dict[str, Any]]:
    """Return the settings of one run for each feature, by name."""
    quick = {"strategy": "panicle"}
    runs: dict[str, dict[str, Any]] = {
        "drift-swap-all": {"strategy": "flexcfl-async", **_SWAP},
        "drift-swap-part": {"strategy": "flexcfl", **_SWAP, "drift": "swap-part"},
        "drift-incremental": {"strategy": "flexcfl", "drift": "incremental", "drift-at": _AT},
        "drift-rotate": {**quick, "drift": "rotate", "drift-at": _AT, "drift-share": 0.5},
        "drift-label-shift": {**quick, "drift": "label-shift", "drift-at": _AT},
        "drift-noise": {"strategy": "casa", "drift": "noise", "drift-at": _AT},
        "drift-in-seconds": {"strategy": "fedasync", "drift": "noise", "drift-at": "5s, 10s"},
        "drift-in-rounds": {"strategy": "fedavg", "drift": "rotate", "drift-at": "every round"},
        "drift-in-order": {
            **{"strategy": "fedasync", "dataset": "npz-folder", "data-root": "BATCHES"},
            **{"clients": 5, "drift": "in-order", "in-order-lag": 1, "drift-at": _AT},
        },
        "tasks-eval": {"strategy": "ewc", **_TASKS, "drift-at": "60 updates"},
        "tasks-own-order": {
            **{"strategy": "fedweit", **_TASKS, "tasks-order": "own"},
            **{"drift-at": "40 updates", "eval-steps": True},
        },
        "stream-sequential": {"strategy": "c-faacl", **_STREAM, "drift-at": _AT},
        "stream-multi-task": {
            **{"strategy": "c-faacl", **_STREAM, "drift-at": _AT},
            **{"stream-mode": "multi-task", "eval-tasks": True},
        },
        "protection-norm": {"strategy": "fedasync", "protection": "norm", **_ROBUST},
        "protection-norm-refuse": {
            **{"strategy": "casa", "protection": "norm", **_ROBUST},
            **{"protection-beyond": "refuse", "protection-factor": 3.0},
        },
        "protection-filter": {
            **{"strategy": "fedasync", "protection": "filter"},
            **{"attack": "sign-flip", "attackers": 0.25, "partition": "iid"},
        },
        "attack-scale": {"strategy": "fedmedian", **_ROBUST, "attack-factor": 20.0},
        "attack-sign-flip": {"strategy": "krum", "attack": "sign-flip"},
        "attack-label-flip": {**quick, "attack": "label-flip"},
        "attack-noise": {"strategy": "fedbuff", "attack": "noise", "attackers-drawn": "anywhere"},
        "concurrency": {"strategy": "fedasync", "concurrency": 3},
        "concurrency-rounds": {"strategy": "fedavg", "concurrency": 3, "fedavg.fraction": 0.6},
        "max-rounds": {"strategy": "cfl", "max-updates": "auto", "max-rounds": 12},
        "max-time": {"strategy": "casa", "max-updates": "auto", "max-time": 15.0},
        "target": {"strategy": "ifca", "target-accuracy": 0.9},
        "eval-rounds": {"strategy": "fesem", "eval-rounds": 3, "eval-clients": 4},
        "client-models": {"strategy": "fedsoft", "client-models": True},
        "client-models-own": {"strategy": "standalone", "client-models": True},
        "client-models-mixed": {"strategy": "cdfl", "client-models": True},
        "score-uploads": {"strategy": "fedasync", "score-uploads": True},
        "proxy-pretrain-mixture": {
            **{"strategy": "cdfl", "score-uploads": True, "proxy": "30", "pretrain": 60},
            **{"drift": "mixture", "drift-at": _AT},
        },
        "fedsoft-async-mixture": {
            **{"strategy": "fedsoft-async", "drift": "mixture", "drift-at": _AT},
        },
        "devices-uniform": {"strategy": "fedasync", "devices": "uniform"},
        "devices-range1to5": {"strategy": "csafl", "devices": "range1to5"},
        "devices-slow30x10": {"strategy": "port", "devices": "slow30x10"},
        "devices-fdma": {"strategy": "csafl", "devices": "fdma"},
        "devices-churn": {"strategy": "panicle", "devices": "churn"},
        "devices-trace": {"strategy": "casa", "devices": "trace:RUN"},
        "adam": {"strategy": "fedasync", "optimizer": "adam", "lr": 0.01, "weight-decay": 1e-3},
        "momentum": {"strategy": "fedprox", "optimizer": "momentum", "local-steps": 5},
        "validation": {"strategy": "faacl", "validation-fraction": 0.2, "validation-share": 0.3},
        "vectorised": {"strategy": "casa", "vectorised": True},
        "worker-processes": {"strategy": "casa", "workers": 2},
        "model-cnn": {"strategy": "fedasync", "model": "cnn", "max-updates": 40},
        "regression-casa": {"strategy": "casa", "dataset": "npz-folder", "data-root": "QUANTITY"},
        "regression-panicle": {
            "strategy": "panicle",
            "dataset": "npz-folder",
            "data-root": "QUANTITY",
        },
        "synthetic": {"strategy": "ifca", "dataset": "synthetic", "clients": 10},
        "large-fleet": {"strategy": "casa", "clients": 60, "casa.exact-up-to": 20},
        "large-fleet-panicle": {"strategy": "panicle", "clients": 60},
    }
    for partition in ("dirichlet", "classes", "iid", "rotation-groups", "noise-groups"):
        runs[f"partition-{partition}"] = {"strategy": "panicle", "partition": partition}
    for scenario in ("s0", "s1", "s2", "a1", "a2"):
        runs[f"scenario-{scenario}"] = {
            **{"strategy": "faacl-async", "partition": "scenario", "scenario": scenario},
            "faacl-async.alpha": 0.1,
        }
    return runs


def _drift_of(name: str) -> dict[str, Any]:
    """Return the drift of a method's run of the kind ``drift``."""
    if name.startswith("feddrift"):
        return {"drift": "concepts", "concept-steps": 4, "drift-at": "every 30 updates"}
    if name in ("ewc", "ssgd", "apd", "fedweit", "c-faacl"):
        return {**_TASKS, "drift-at": "60 updates"}
    return _SWAP


def cases() -> dict[str, dict[str, Any]]:
    """Return the settings of all runs by name: three of each method, and those of features.

    A method runs on steady devices, on devices that come, go and lose tasks, and on data that
    change. The run ``resumed/NAME`` is the one on unreliable devices, stopped at 60 updates and
    resumed: it must equal the uninterrupted run.
    """
    found: dict[str, dict[str, Any]] = {}
    churn = {"devices": "CHURN", "task-timeout": 20.0}
    for name in STRATEGIES:
        found[f"steady/{name}"] = {"strategy": name}
        found[f"churn/{name}"] = {"strategy": name, **churn}
        found[f"resumed/{name}"] = {"strategy": name, **churn}
        found[f"drift/{name}"] = {"strategy": name, **_drift_of(name)}
    found |= {f"special/{name}": keys for name, keys in _special().items()}
    for choice in _OPTIONS.split():
        key, _, value = choice.partition("=")
        name = key.partition(".")[0]
        found[f"option/{KEYS.get(key, key)}={value}"] = {
            "strategy": name,
            **_drift_of(name),
            key: value,
        }
    needed = {name: _NEEDS.get(keys["strategy"], {}) for name, keys in found.items()}
    return {name: {**_BASE, **needed[name], **keys} for name, keys in found.items()}


def run_case(name: str) -> dict[str, Any]:
    """Run a case, and return its hashes and its key figures.

    Raises
    ------
    RuntimeError
        It cannot run; the message has the error.
    """
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            os.environ["RACEME_CACHE"] = str(Path(folder) / "cache")
            return _run_case(name, Path(folder))
    except Exception as error:
        raise RuntimeError(f"{name}: {error!r}\n{traceback.format_exc()}") from None


def _run_case(name: str, folder: Path) -> dict[str, Any]:
    settings = {key: _made(value, folder) for key, value in cases()[name].items()}
    # The dataset's files determine the number of clients.
    if settings["dataset"] == "npz-folder":
        settings["clients"] = "auto"
    stream, out = Stream(), folder / "run"
    resumed = name.startswith("resumed/")
    ran = run(settings, out, stream.observe, stream.stopped if resumed else _never)
    if resumed:
        stream.forget_end()
        ran = run(settings, out, stream.observe, _never)
    summary = ran.summary
    return {
        "models": {kind: digest(models) for kind, models in ran.models.items() if models},
        **stream.hashes(),
        "figures": {
            "score": _rounded(summary[summary.get("measure", "accuracy")]),
            "clusters": summary["clusters"],
        },
    }


def _never() -> str:
    return ""


def _made(value: Any, folder: Path) -> Any:
    """Create the file or folder that a setting names, and return its path."""
    if value == "CHURN":
        path = folder / "churn.toml"
        path.write_text(_CHURN)
        return str(path)
    if value == "trace:RUN":
        earlier = folder / "earlier"
        settings = {**_BASE, "strategy": "fedasync", "devices": "churn"}
        run(settings, earlier, lambda event: None, _never)
        return f"trace:{earlier}"
    if value == "QUANTITY":
        path = folder / "quantity"
        path.mkdir()
        rng = np.random.default_rng(4)
        for number in range(6):
            x = rng.normal(size=(80, 5)).astype(np.float32)
            slope = np.array([1, 2, -1, 0, 3]) * (1 if number % 2 else -1)
            y = 20 + 4 * x @ slope + rng.normal(size=80)
            np.savez(path / f"{number}.npz", x=x, y=y, unit="cm", group=number % 2)
        return str(path)
    if value == "BATCHES":
        path = folder / "batches"
        path.mkdir()
        rng = np.random.default_rng(5)
        for number in (1, 2, 3):
            y = np.arange(90) % 6
            inputs = rng.normal(size=(90, 128)) + number + y[:, None] * rng.normal(size=128)
            np.savez(path / f"batch_{number:02d}.npz", x=inputs, y=y)
        script, out = Path(__file__).with_name("convert_data.py"), folder / "converted"
        made = [script, "gas-drift", path, out, "--clients", "5", "--seed", str(_BASE["seed"])]
        subprocess.run([sys.executable, *made], check=True, capture_output=True)
        return str(out)
    return value


def _arrays(path: Path) -> list[Any]:
    """Return the arrays of a model, in the order of their names."""
    return [array for _, array in sorted(load_file(path).items())]


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)


# The file.


def fingerprint() -> dict[str, str]:
    """Return the platform properties on which hashes of floating-point results depend."""
    cpu = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        pass
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": cpu,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "numpy": np.__version__,
        **{name: _version(name) for name in ("scipy", "scikit-learn", "flwr")},
    }


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def run_cases(names: Sequence[str], workers: int) -> dict[str, dict[str, Any]]:
    """Run cases in parallel processes, and return their results by name."""
    # Single-threaded matrix products are the same on any
    # number of cores; worker processes inherit this.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    context = multiprocessing.get_context("spawn")
    results: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting = {name: pool.submit(run_case, name) for name in names}
        for number, (name, future) in enumerate(waiting.items(), 1):
            try:
                results[name] = future.result()
            except RuntimeError as error:
                results[name] = {"failed": str(error).splitlines()[0][:200]}
                print(error, file=sys.stderr)
            if number % 50 == 0:
                print(f"{number} of {len(names)} runs", file=sys.stderr, flush=True)
    for name, found in results.items():
        whole = results.get(name.replace("resumed/", "churn/"), {})
        if name.startswith("resumed/") and "failed" not in found:
            results[name] = {"unlike the uninterrupted run": list(_differing(whole, found))}
    return results


def static_parts() -> dict[str, Any]:
    """Return the parts that need no runs: keys, suites, and the configurations of the results."""
    root = Path(__file__).resolve().parents[1]
    keys = keys_with_defaults()
    expanded = {}
    for name, suite in suites():
        runs = [{**run, "config": named_as_before(run["config"])} for run in suite_runs(suite)]
        expanded[name] = {
            "runs": len(runs),
            "configurations": digest(sorted(map(canonical, runs))),
            "shown": digest(suite_shown(suite)),
        }
    configurations = result_configurations(root / "docs" / "results")
    results = Counter(digest(named_as_before(config)) for config in configurations)
    return {
        "keys": dict(sorted(named_as_before(keys).items())),
        "suites": expanded,
        "results": {"configurations": results.total(), "hashes": dict(sorted(results.items()))},
    }


def differences(old: Mapping[str, Any], new: Mapping[str, Any], runs: bool = True) -> list[str]:
    """Return what differs between two files, one line each.

    Parameters
    ----------
    old, new : Mapping
        The content of two files; of `new`, the runs may be a part of those of `old`.
    runs : bool
        Whether to compare the hashes of runs, which is of use on the same platform only.
    """
    lines = []
    for name in ("keys", "suites", "results"):
        if name in new:
            lines += [f"{name}: {line}" for line in _differing(old[name], new[name])]
    for name, found in new["runs"].items():
        if _is_wrong(found):
            lines.append(f"{name}: {_compact(found)}")
        elif name not in old["runs"]:
            lines.append(f"{name}: not in the old file")
        elif runs:
            lines += [f"{name}: {line}" for line in _differing(old["runs"][name], found)]
    if new.get("whole"):
        lines += [f"{name}: not run" for name in old["runs"] if name not in new["runs"]]
    return lines


def _differing(old: Any, new: Any, path: str = "") -> Iterable[str]:
    """Yield the paths of values that differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            inner = f"{path}.{name}" if path else name
            if name not in new:
                yield f"{inner} is missing"
            elif name not in old:
                yield f"{inner} is new"
            else:
                yield from _differing(old[name], new[name], inner)
    elif old != new:
        is_hash = isinstance(old, str) and len(old) == _DIGITS
        yield f"{path} differs" if is_hash else f"{path}: {old!r} became {new!r}"


def write(path: Path, only: Sequence[str] = (), workers: int = 2) -> int:
    """Run the cases whose names begin with one of `only`, or all, and write a file.

    Returns
    -------
    int
        0, or 1 if a case failed or a resumed run is not the uninterrupted one.
    """
    known = cases()
    chosen = {name for name in known if not only or any(_chosen(name, part) for part in only)}
    if not chosen:
        print(f"no case is called {', '.join(only)}", file=sys.stderr)
        return 1
    # A resumed run is compared with the uninterrupted run of the same method.
    chosen |= {name.replace("resumed/", "churn/") for name in chosen}
    names = [name for name in known if name in chosen]
    content: dict[str, Any] = {"fingerprint": fingerprint(), "whole": not only}
    if not only:
        content |= static_parts()
    content["runs"] = run_cases(names, workers)
    path.write_text(_text(content), encoding="utf-8")
    wrong = [name for name, found in content["runs"].items() if _is_wrong(found)]
    for name in wrong:
        print(f"{name}: {_compact(content['runs'][name])}")
    return int(bool(wrong))


def _is_wrong(found: Mapping[str, Any]) -> bool:
    """Return whether a run failed, or was resumed and differs from the uninterrupted run."""
    return "failed" in found or bool(found.get("unlike the uninterrupted run"))


def _chosen(name: str, part: str) -> bool:
    """Return whether `part` selects a case: by its name, kind, method or feature."""
    return part in (name, *name.split("/"))


def _text(content: Mapping[str, Any]) -> str:
    """Serialise with one line per run, suite and so on, so that a diff shows what changed."""
    lines = []
    for name, value in content.items():
        if isinstance(value, dict) and name != "results":
            inner = ",\n".join(f"  {json.dumps(k)}: {_compact(v)}" for k, v in value.items())
            lines.append(f" {json.dumps(name)}: {{\n{inner}\n }}")
        else:
            lines.append(f" {json.dumps(name)}: {_compact(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writer = commands.add_parser("write", help="run everything and write the hashes")
    writer.add_argument("file", type=Path)
    writer.add_argument("--only", default="", help="comma-separated cases, kinds or methods")
    writer.add_argument("--workers", type=int, default=2, help="number of processes")
    checker = commands.add_parser("static", help="compare keys, suites and results only")
    checker.add_argument("file", type=Path)
    comparer = commands.add_parser("compare", help="print the differences")
    comparer.add_argument("old", type=Path)
    comparer.add_argument("new", type=Path)
    given = parser.parse_args()
    if given.command == "write":
        return write(given.file, [part for part in given.only.split(",") if part], given.workers)
    if given.command == "static":
        old, new = json.loads(given.file.read_text(encoding="utf-8")), static_parts()
        return _told(differences(old, {**_plain(new), "runs": {}}))
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (given.old, given.new))
    same = old["fingerprint"] == new["fingerprint"]
    if not same:
        print("made on different platforms: hashes of runs are not compared", file=sys.stderr)
    return _told(differences(old, new, runs=same))


def _told(lines: Sequence[str]) -> int:
    """Print differences, and return the command's exit code."""
    print("\n".join(lines) or "no differences")
    return int(bool(lines))


def _plain(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a content as it reads after a round trip through JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(content))
    return plain


if __name__ == "__main__":
    sys.exit(main())
