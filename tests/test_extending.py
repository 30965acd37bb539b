"""The examples of docs/extending.md do what the page says."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest

from raceme import datasets
from raceme.core.config import RunConfig, all_keys
from raceme.core.registry import DATASETS, Registry
from raceme.core.strategy import Method
from raceme.experiments.suites import load_suite, variants
from raceme.runs.experiment import simulate
from raceme.strategies import STRATEGIES

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)


def registered(registry: Registry, line: str, package: str) -> str:
    """Register the line of the page as it stands there; return the name of its module."""
    name, module, attribute = re.fullmatch(r'\s*"(.+)": "(.+):(.+)",\s*', line).groups()
    assert module.startswith(f"raceme.{package}.")
    registry._targets[name] = f"{module.rpartition('.')[2]}:{attribute}"
    return module.rpartition(".")[2]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The page's Python blocks; what they register is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for registry in (STRATEGIES, DATASETS):
        monkeypatch.setattr(registry, "_targets", dict(registry._targets))
    return blocks("python")


def test_the_strategy_of_the_page(
    page: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, line, *_ = page
    module = registered(STRATEGIES, line, "strategies")
    (tmp_path / f"{module}.py").write_text(source)
    assert "latest-mean.speed" in all_keys()
    keys = {"strategy": "latest-mean", "latest-mean.speed": 0.5, "clients": 10, "partition": "iid"}
    config = RunConfig.from_mapping({**keys, "max-updates": 120, "out": str(tmp_path / "run")})
    outcome = simulate(config)
    assert outcome.complete
    assert outcome.summary["updates"] == 120
    assert outcome.summary["accuracy"] > 0.7
    strategy = STRATEGIES["latest-mean"]
    assert issubclass(strategy, Method)
    monkeypatch.delitem(sys.modules, module)


def test_the_dataset_of_the_page(
    page: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, line = page[2:4]
    module = registered(DATASETS, line, "datasets")
    (tmp_path / f"{module}.py").write_text(source)
    keys = {"dataset": "iris", "strategy": "fedasync", "clients": 5, "partition": "iid"}
    config = RunConfig.from_mapping({**keys, "max-updates": 50, "out": str(tmp_path / "run")})
    assert datasets.data_shape(config).input_shape == (4,)
    narrow = RunConfig.from_mapping({**keys, "set": "measurements=2"})
    assert datasets.data_shape(narrow).input_shape == (2,)
    assert simulate(config).summary["updates"] == 50
    monkeypatch.delitem(sys.modules, module)


def test_the_suite_of_the_page(tmp_path: Path) -> None:
    text, _ = blocks("toml")
    (tmp_path / "suite.toml").write_text(text)
    suite = load_suite(tmp_path / "suite.toml")
    patient, grouped, hasty = suite.methods
    assert suite.config(patient, 0).max_updates == 2000
    assert [variant.row.accuracy for variant in grouped.variants() if variant.row] == [94.1, 95.2]
    assert [suite.config(point, 0, trial=True).max_updates for point in hasty.variants()] == [
        400,
        400,
    ]
    assert [point.options["server-lr"] for point in hasty.variants()] == [0.3, 1.0]


def test_the_suite_with_variants_of_the_page(tmp_path: Path) -> None:
    path = tmp_path / "suite.toml"
    path.write_text(blocks("toml")[1])
    found = variants(path)
    assert set(found) == {"digits-even", "digits-slow", "synthetic-even"}
    slow, synthetic = load_suite(found["digits-slow"]), load_suite(found["synthetic-even"])
    assert (slow.title, slow.async_updates) == ("Waiting, digits, slow devices", 2000)
    assert [note.split()[0] for note in slow.notes] == ["Slow:", "Accuracies"]
    assert [method.row and method.row.time for method in synthetic.methods] == [math.inf, 20]
    assert [method.row for method in slow.methods] == [None, None]
