"""Flower App Bundles, made as `flwr run` makes them."""

from __future__ import annotations

from pathlib import Path

from flwr.cli.build import build_fab_from_disk


def build_bundle(folder: Path) -> bytes:
    """Return the app in a folder as a bundle; the same files make the same bytes."""
    return bytes(build_fab_from_disk(folder))
