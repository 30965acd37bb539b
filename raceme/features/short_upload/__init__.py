"""Uploads of 8 bits per weight; :mod:`raceme.features.short_upload.codes` has the mathematics."""

from __future__ import annotations

from dataclasses import dataclass

from raceme.core.options import option


@dataclass(frozen=True)
class Options:
    """Switches the codes on."""

    upload: str = option(
        "float32",
        "trained models on their way to the server: as they are, or 8 bits per weight",
        among=("float32", "int8"),
    )
