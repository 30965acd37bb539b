"""Weights & Biases: on disk, unless ``WANDB_MODE`` says otherwise; ``wandb sync`` uploads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from raceme.config import Value
from raceme.tracking.measurements import final

RUN_FILE = "wandb-run.txt"
"""In the run's folder: which run of Weights & Biases it is, for the time after a resumption."""


class Wandb:
    """A run in Weights & Biases; the step of each chart is the number of updates."""

    def __init__(
        self, out: Path, name: str, parameters: Mapping[str, Value], resumed: int | None
    ) -> None:
        kept = out / RUN_FILE
        known = kept.read_text(encoding="utf-8").strip() if kept.is_file() else None
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "raceme"),
            # Nothing leaves the machine unless its owner has said so.
            mode=os.environ.get("WANDB_MODE", "offline"),  # type: ignore[arg-type]
            dir=str(out),
            name=name,
            id=known if resumed is not None else None,
            resume="allow",
            config=dict(parameters),
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
            reinit="create_new",
        )
        kept.write_text(f"{self._run.id}\n", encoding="utf-8")
        self._notes: list[str] = []

    def log(self, measured: Mapping[str, float], updates: int, time: float) -> None:
        """Take what was measured."""
        self._run.log(dict(measured), step=updates)

    def note(self, text: str, updates: int) -> None:
        """Take a line of text; they are one table at the end."""
        self._notes.append(text)

    def end(self, summary: Mapping[str, Any], files: list[Path]) -> None:
        """Take the final numbers, the plots and the files."""
        # accuracy.png must not take the place of the accuracy.
        plots = {
            f"plots/{path.stem}": wandb.Image(str(path)) for path in files if path.suffix == ".png"
        }
        table = wandb.Table(columns=["change"], data=[[note] for note in self._notes])
        self._run.log({**plots, "changes": table}, step=int(summary["updates"]))
        self._run.summary.update({f"final_{k}": value for k, value in final(summary).items()})
        artefact = wandb.Artifact(f"run-{self._run.id}", type="run")
        for path in files:
            below = "clusters/" if path.parent.name == "clusters" else ""
            artefact.add_file(str(path), below + path.name)
        self._run.log_artifact(artefact)

    def close(self, failed: bool) -> None:
        """Say how the run has ended, and write what is left."""
        self._run.finish(exit_code=int(failed))


def open_tracker(
    out: Path, name: str, parameters: Mapping[str, Value], resumed: int | None
) -> Wandb:
    """Return the tracker of a run."""
    return Wandb(out, name, parameters, resumed)
