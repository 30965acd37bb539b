"""Trackers' own libraries read the data of a run from disk."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.events import Evaluated
from raceme.records.summary import RunSummary
from raceme.runs.experiment import resolve, simulate
from raceme.runs.trackers import TrackerObserver, run_name

pytestmark = pytest.mark.pictures

if TYPE_CHECKING:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from wandb.proto.wandb_internal_pb2 import Record

SMALL = {
    "clients": 3,
    "groups": "0.5,0.5",
    "max-updates": 12,
    "workers": "0",
    "checkpoint-every": 4,
    "eval-every": 6,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterable[tuple[Path, dict[str, Any]]]:
    """Yield the folder and the summary of a run that used all trackers, and was resumed."""
    place = tmp_path_factory.mktemp("tracked")
    out = place / "casa" / "seed-0"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{place}/mlflow.db")
        patch.setenv("WANDB_DATA_DIR", str(place / "wandb-data"))
        patch.setenv("WANDB_CACHE_DIR", str(place / "wandb-cache"))
        patch.setenv("WANDB_CONFIG_DIR", str(place / "wandb-config"))
        keys = {**SMALL, "track": "tensorboard, mlflow,wandb", "out": str(out)}
        simulate(RunConfig.from_mapping(keys))
        longer = {**keys, "max-updates": 18, "resume": str(out)}
        outcome = simulate(RunConfig.from_mapping(longer))
        assert not outcome.unwritten
        yield out, outcome.summary


def written(out: Path) -> EventAccumulator:
    """Return the data that TensorBoard shows."""
    # Imported here, as trackers' libraries take seconds to import.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(out / "tensorboard"), {"scalars": 0, "images": 0})
    found.Reload()
    return found


@pytest.mark.slow
def test_tensorboard_has_curves_texts_and_plots(runs: tuple[Path, dict[str, Any]]) -> None:
    out, summary = runs
    found = written(out)
    curve = [(event.step, event.value) for event in found.Scalars("result/accuracy")]
    assert [step for step, _ in curve] == [0, 6, 12, 18]
    assert curve[-1][1] == pytest.approx(summary["accuracy"])
    assert "accuracy" in found.Tags()["images"]
    assert "parameters/text_summary" in found.Tags()["tensors"]


@pytest.mark.slow
def test_mlflow_has_one_run_with_parameters_metrics_and_files(
    runs: tuple[Path, dict[str, Any]],
) -> None:
    from mlflow import MlflowClient

    _, summary = runs
    client = MlflowClient()
    experiment = client.get_experiment_by_name("raceme")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "casa/seed-0"
    assert run.info.status == "FINISHED"
    assert run.data.params["casa.gamma"] == "0.15"
    history = client.get_metric_history(run.info.run_id, "accuracy")
    assert sorted({metric.step for metric in history}) == [0, 6, 12, 18]
    assert run.data.metrics["final_accuracy"] == pytest.approx(summary["accuracy"])
    files = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert {"summary.json", "config.toml", "accuracy.png", "clusters"} <= files


OPENS = """
import sys
from pathlib import Path
from raceme.runs.trackers import Mlflow
out = Path(sys.argv[1])
out.mkdir()
print("ready", flush=True)
sys.stdin.readline()
Mlflow(out, out.name, {"lr": 0.1}, None).close(failed=False)
"""


@pytest.mark.slow
def test_runs_that_begin_at_once_share_a_new_database(tmp_path: Path) -> None:
    environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", OPENS, str(tmp_path / f"seed-{seed}")],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(3)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    told = []
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in started:
        told.append(process.communicate(timeout=120)[1])
    assert [process.returncode for process in started] == [0, 0, 0], told


@pytest.mark.slow
def test_wandb_has_both_parts_of_one_run_on_disk(runs: tuple[Path, dict[str, Any]]) -> None:
    out, summary = runs
    identity = (out / "wandb-run.txt").read_text().strip()
    steps: list[int] = []
    names: set[str] = set()
    for path in sorted(out.glob(f"wandb/offline-run-*/run-{identity}.wandb")):
        for record in records(path):
            names |= {record.run.display_name} if record.HasField("run") else set()
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            if "accuracy" in items and isinstance(items["accuracy"], float):
                steps.append(record.history.step.num or items["_step"])
                last = items["accuracy"]
    assert names == {"casa/seed-0"}
    # The updates after the first part's last checkpoint are repeated in the second part.
    assert steps == [0, 6, 12, 12, 18]
    assert last == pytest.approx(summary["accuracy"])


def records(path: Path) -> Iterator[Record]:
    """Read a file of Weights & Biases: seven bytes, then a log in LevelDB's format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        # The last fragment of a record, or a complete one.
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def test_a_tracker_that_fails_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nobody://knows/this")
    config = resolve(RunConfig.from_mapping({**SMALL, "track": "mlflow,tensorboard"}))
    with TrackerObserver(config, tmp_path, None, RunSummary()) as tracking:
        tracking(Evaluated(0.0, 0, 0.5, 1.0, 1))
    assert set(tracking.failures) == {"track=mlflow"}
    found = written(tmp_path)
    assert found.Scalars("result/accuracy")[0].value == 0.5


def test_an_unknown_tracker_is_said_before_anything_starts(tmp_path: Path) -> None:
    keys = {**SMALL, "track": "tensorbord", "out": str(tmp_path / "run")}
    with pytest.raises(UserError, match=r"tensorbord.*tensorboard"):
        simulate(RunConfig.from_mapping(keys))
    assert not (tmp_path / "run").exists()


def test_runs_of_a_comparison_have_the_names_of_method_and_seed() -> None:
    assert run_name(Path("runs/night/fedavg/seed-2")) == "fedavg/seed-2"
    assert run_name(Path("runs/20261123-casa-digits")) == "20261123-casa-digits"
