"""TensorBoard: scalars, texts and plots in the run's folder; ``tensorboard --logdir OUT``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from raceme.config import Value
from raceme.tracking.measurements import final

FOLDER = "tensorboard"


class TensorBoard:
    """A run in TensorBoard; the step of each curve is the number of updates."""

    def __init__(
        self, out: Path, name: str, parameters: Mapping[str, Value], resumed: int | None
    ) -> None:
        # After a resumption the steps that come again replace those of the lost process.
        purge = None if resumed is None else resumed + 1
        self._writer = SummaryWriter(str(out / FOLDER), purge_step=purge)
        self._parameters = parameters
        if resumed is None:
            lines = "\n".join(f"    {key} = {value!r}" for key, value in parameters.items())
            self._writer.add_text("parameters", f"{name}\n\n{lines}", 0)

    def log(self, measured: Mapping[str, float], updates: int, time: float) -> None:
        """Take what was measured."""
        for name, value in measured.items():
            self._writer.add_scalar(_grouped(name), value, updates)

    def note(self, text: str, updates: int) -> None:
        """Take a line of text."""
        self._writer.add_text("clusters", text, updates)

    def end(self, summary: Mapping[str, Any], files: list[Path]) -> None:
        """Take the final numbers beside the parameters, and the plots as pictures."""
        updates = int(summary["updates"])
        for path in files:
            if path.suffix == ".png":
                with Image.open(path) as image:
                    pixels = np.asarray(image.convert("RGB"))
                self._writer.add_image(path.stem, pixels, updates, dataformats="HWC")
        numbers = {f"final/{name}": value for name, value in final(summary).items()}
        self._writer.add_hparams(dict(self._parameters), numbers, run_name="parameters")

    def close(self, failed: bool) -> None:
        """Write what is left."""
        self._writer.close()


def _grouped(name: str) -> str:
    """Return the name with its section: one for the clusters' curves, one for accounts."""
    if name.startswith("cluster_"):
        return f"clusters/{name}"
    kept = ("accuracy", "error", "loss")
    return f"result/{name}" if name.endswith(kept) else f"run/{name}"


def open_tracker(
    out: Path, name: str, parameters: Mapping[str, Value], resumed: int | None
) -> TensorBoard:
    """Return the tracker of a run."""
    return TensorBoard(out, name, parameters, resumed)
