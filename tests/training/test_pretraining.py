"""Failures of the server's pre-training."""

from __future__ import annotations

from pathlib import Path

import pytest

from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.runs.experiment import resolve, simulate


@pytest.mark.parametrize(
    ("lr", "why"), [(1e30, r"too large: .* 1\.\de\+3\d"), (3e38, "not finite: .* NaN or infinity")]
)
def test_a_model_that_is_ruined_by_pretraining_is_said_in_one_line(
    lr: float, why: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    keys = {"strategy": "fedsoft-async", "partition": "rotation-groups", "workers": "0"}
    config = RunConfig.from_mapping(keys | {"pretrain": 50, "lr": lr, "out": str(out)})
    with pytest.raises(UserError, match=f"^pretrain gave an unusable model, .*{why}: lower lr"):
        simulate(resolve(config))
    # The next attempt may use the same folder.
    assert not list(out.iterdir())
