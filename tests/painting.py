"""Figures without their pixels, which take most of a short run's time.

Runs draw their figures and write their files as ever, but matplotlib paints them only for tests
that are marked with `pictures`. The others get one white pixel.
"""

from __future__ import annotations

import os
from base64 import b64decode
from typing import Any

from matplotlib.cbook import open_file_cm
from matplotlib.figure import Figure

PAINTED = "RACEME_TESTS_PICTURES"
"""The environment variable that tells processes of tests whether to paint."""

_PIXEL = b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTj2FAAAAABJRU5ErkJggg=="
)


def paint_only_if_told() -> None:
    """Let this process paint pictures only while the environment variable is ``1``."""
    save = Figure.savefig

    def savefig(figure: Figure, to: Any, **how: Any) -> None:
        if os.environ.get(PAINTED) == "1" or how.get("format") != "png":
            save(figure, to, **how)
        else:
            with open_file_cm(to, "wb") as file:
                file.write(_PIXEL)

    Figure.savefig = savefig  # type: ignore[method-assign]
