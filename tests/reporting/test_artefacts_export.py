"""Exported models give what the run's network gives, without Raceme."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import raceme
from raceme import datasets
from raceme.cli import main
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.installation import install_line
from raceme.notebook import OpenRun
from raceme.records.folder import model_file
from raceme.reporting import artefacts
from raceme.reporting.artefacts import export_model
from raceme.runs.experiment import resolve, simulate
from raceme.training.clients import network_of

FORMATS = ("safetensors", "onnx")
KEYS: dict[str, object] = {"clients": 4, "max-updates": 8, "workers": "0", "strategy": "fedasync"}
ALONE = """
import runpy, sys
sys.modules["raceme"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def finished(out: Path, **keys: object) -> RunConfig:
    config = resolve(RunConfig.from_mapping(KEYS | {"out": str(out)} | keys))
    simulate(config)
    return config


def predicted(folder: Path, inputs: np.ndarray) -> list[Any]:
    """Run the command that the export prints, in a process without Raceme."""
    file = folder.parent / "inputs.npy"
    np.save(file, inputs)
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(folder / "predict.py"), str(file)],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder.parent,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(run: Path, kind: str, of: int | str = 0) -> Path:
    """Export a model; compare labels and probabilities with those of the run's network."""
    config = RunConfig.from_mapping(OpenRun(run).config)
    data = datasets.load(config)
    chosen: dict[str, Any] = {"device": of} if isinstance(of, str) else {"cluster": of}
    folder, _ = export_model(run, kind, trust=str(run), **chosen)
    network = network_of(config)
    arrays = load_file(model_file(run, of))
    network.module.load_state_dict({k: torch.from_numpy(v) for k, v in arrays.items()})
    network.module.eval()
    with torch.no_grad():
        shares = network.module(torch.from_numpy(data.inputs(np.arange(100)))).softmax(1).numpy()
    found = predicted(folder, data.x[:100])
    assert [int(label) for label, _ in found] == shares.argmax(1).tolist()
    np.testing.assert_allclose([share for _, share in found], shares.max(1), atol=1e-4)
    assert not list(folder.glob("__pycache__"))
    return folder


def test_a_clusters_model_runs_without_raceme(tmp_path: Path) -> None:
    finished(tmp_path / "run")
    folder = check(tmp_path / "run", "safetensors")
    assert folder == tmp_path / "run" / "export" / "cluster-0-safetensors"
    about = json.loads((folder / "model.json").read_text())
    assert about["cluster"] == 0
    assert about["updates"] == 8
    assert about["input"] == {"shape": [1, 8, 8], "type": "float32"}
    assert about["labels"] == [str(digit) for digit in range(10)]
    with pytest.raises(UserError, match="exists already and is kept"):
        export_model(tmp_path / "run")


def test_bytes_are_normalised_in_the_model(tmp_path: Path) -> None:
    """Bytes are accepted as they are; classes have the given names."""
    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 256, (40, 6, 6), np.uint8), rng.integers(0, 3, 40)
    run = raceme.run(
        "fedasync",
        data={name: {"x": x, "y": y, "num_classes": 3} for name in "ab"},
        max_updates=4,
        workers="0",
        out=str(tmp_path / "run"),
    )
    folder = run.export(labels=["low", "middle", "high"], out=tmp_path / "model")
    about = json.loads((folder / "model.json").read_text())
    assert about["input"]["type"] == "uint8"
    assert about["labels"] == ["low", "middle", "high"]
    config = RunConfig.from_mapping(run.config)
    network = network_of(config)
    network.module.load_state_dict({k: torch.from_numpy(v) for k, v in run.model(0).items()})
    shape = datasets.data_shape(config).input_shape
    inputs = datasets.load(config).inputs(np.arange(len(x)))
    with torch.no_grad():
        wanted = network.module.eval()(torch.from_numpy(inputs)).argmax(1).tolist()
    found = predicted(folder, x.reshape(-1, *shape))
    assert [about["labels"].index(label) for label, _ in found] == wanted
    with pytest.raises(UserError, match="--labels has 2 names, and there are 3"):
        run.export(labels=["a", "b"], out=tmp_path / "other")


def output_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the one-line error of an invalid command."""
    sys.argv = ["raceme", "export", *map(str, arguments)]
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    run = tmp_path / "run"
    finished(run, strategy="panicle", **{"clients": 6, "max-updates": 60})
    opened = OpenRun(run)
    gone = [cluster for event in opened.record.changes for cluster in event.gone]
    left = sorted(opened.models)
    assert f"Cluster {gone[0]} is gone (" in output_of(capsys, run, "--cluster", gone[0])
    assert f"There is no cluster 77. There are {', '.join(map(str, left))}." in output_of(
        capsys, run, "--cluster", 77
    )
    assert "choose one with --cluster, or a device with --device" in output_of(capsys, run)
    assert "Did you mean 'client-3'?" in output_of(capsys, run, "--device", "clinet-3")
    for former in ("torchscript", "pt"):
        line = output_of(capsys, run, "--format", former, "--cluster", left[0])
        assert f"Unknown format '{former}'" in line
    assert "Did you mean 'onnx'?" in output_of(
        capsys, run, "--format", "onxx", "--cluster", left[0]
    )
    assert "give one of them" in output_of(
        capsys, run, "--cluster", left[0], "--device", "client-0"
    )
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert install_line("export") in output_of(
        capsys, run, "--cluster", left[0], "--format", "onnx"
    )
    for file in (run / "clusters").iterdir():
        file.write_bytes(b"x")
    assert ".safetensors cannot be read: " in output_of(capsys, run, "--cluster", left[0])
    with pytest.raises(UserError, match=r"cannot be read: .* resumed from a checkpoint writes it"):
        opened.model(left[0])
    for file in (run / "clusters").iterdir():
        file.unlink()
    assert "has no models" in output_of(capsys, run)
    assert not (run / "export").exists()
    assert "is not the folder of a run" in output_of(capsys, tmp_path)


def test_a_model_that_differs_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program and the network are compared on inputs that are normalised as in training."""
    finished(tmp_path / "run")
    program = tmp_path / "predict.txt"
    text = artefacts._TEMPLATE.read_text()
    program.write_text(
        text.replace(
            "@NETWORK@", "@NETWORK@\nscores_ = scores\nscores = lambda x: scores_(x) * 1.01\n"
        )
    )
    monkeypatch.setattr(artefacts, "_TEMPLATE", program)
    with pytest.raises(UserError, match="differs from the run's by"):
        export_model(tmp_path / "run")
    assert not list((tmp_path / "run" / "export").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("model", ["mlp", "cnn", "resnet18", "networks:small_batch_norm"])
def test_networks_of_images(model: str, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    finished(tmp_path / "run", model=model, **{"max-updates": 4})
    check(tmp_path / "run", kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_windows_and_a_quantity(kind: str, tmp_path: Path) -> None:
    """A GRU on windows, for classes and for a quantity, which is output in its unit."""
    pytest.importorskip("onnxruntime")
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((60, 12, 3)) * 5 + 20).astype(np.float32)
    for name, labels in (
        ("classes", {"y": (x[:, -1, 0] > 20).astype(np.int64)}),
        ("quantity", {"y": x[:, -1, 0].astype(np.float32), "unit": "°C"}),
    ):
        run = raceme.run(
            "fedasync",
            data={device: {"x": x, **labels} for device in "ab"},
            model="gru",
            max_updates=4,
            workers="0",
            out=str(tmp_path / name),
        )
        folder = run.export(kind, out=tmp_path / f"{name}-model")
        config = RunConfig.from_mapping(run.config)
        data = datasets.load(config)
        network = network_of(config)
        network.module.load_state_dict({k: torch.from_numpy(v) for k, v in run.model(0).items()})
        with torch.no_grad():
            outputs = network.module.eval()(torch.from_numpy(data.inputs(np.arange(60)))).numpy()
        found = predicted(folder, x)
        if data.target is None:
            assert [int(label) for label, _ in found] == outputs.argmax(1).tolist()
        else:
            wanted = outputs[:, 0] * data.target.std + data.target.mean
            np.testing.assert_allclose(found, wanted, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_text(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    x = np.random.default_rng(3).integers(0, 30, (120, 9))
    run = raceme.run(
        "fedasync",
        data={device: {"x": x, "y": x[:, 0] % 2} for device in "ab"},
        model="gru",
        max_updates=4,
        workers="0",
        out=str(tmp_path / "run"),
    )
    folder = check(run.folder, kind)
    assert json.loads((folder / "model.json").read_text())["input"]["type"] == "int64"


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_a_devices_own_model(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    finished(tmp_path / "run", strategy="panicle", partition="dirichlet", **{"client-models": True})
    check(tmp_path / "run", kind, "client-1")
    assert (tmp_path / "run" / "export" / f"device-client-1-{kind}").is_dir()
