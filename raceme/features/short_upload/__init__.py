"""Uploads of 8 bits per weight; the mathematics is in :mod:`raceme.features.short_upload.codes`."""

from __future__ import annotations

from dataclasses import dataclass

from raceme.core.options import option


@dataclass(frozen=True)
class Options:
    """Switches the codes on."""

    upload: str = option(
        "float32",
        "encoding of uploaded models: unchanged, or 8 bits per weight",
        among=("float32", "int8"),
    )
