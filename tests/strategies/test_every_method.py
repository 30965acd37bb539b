"""Every registered method starts, trains, is stored, and resumes where it was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raceme.core.config import RunConfig, read_toml
from raceme.core.registry import STRATEGIES
from raceme.records.record import read_run
from raceme.runs.experiment import simulate

NEEDS: dict[str, dict[str, Any]] = {"cdfl": {"proxy": "20"}}
"""Keys without which a method does not start."""
KEPT = 5


@pytest.mark.smoke
@pytest.mark.parametrize("name", list(STRATEGIES))
def test_a_method_starts_is_stored_and_resumed(name: str, tmp_path: Path) -> None:
    settings = {"clients": 8, "workers": 0, "eval-every": 10}
    settings |= {"max-updates": 10, "checkpoint-every": KEPT, "out": str(tmp_path)}
    simulate(RunConfig.from_mapping({"strategy": name, **settings, **NEEDS.get(name, {})}))
    first = read_run(tmp_path)
    before = len(first.updates.time)
    assert before >= 10
    assert (tmp_path / "summary.json").exists()

    kept = read_toml(tmp_path / "config.toml")
    resumed = {**kept, "max-updates": before + 10, "resume": str(tmp_path), "out": ""}
    simulate(RunConfig.from_mapping(resumed))
    then = read_run(tmp_path)
    assert len(then.updates.time) >= before + 10
    # Events after the last checkpoint may depend on the end of the run.
    assert list(then.updates.client[:KEPT]) == list(first.updates.client[:KEPT])
    assert list(then.updates.time[:KEPT]) == list(first.updates.time[:KEPT])
    assert list((tmp_path / "clusters").glob("*.safetensors"))
