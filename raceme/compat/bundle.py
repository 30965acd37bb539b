"""Flower App Bundles, made as `flwr run` makes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flwr.cli.build import build_fab_from_disk


@dataclass(frozen=True)
class App:
    """The app bundle of the run, which devices fetch.

    Attributes
    ----------
    name, version : str
        Publisher/name, and version.
    bundle : bytes
        The bundle.
    """

    name: str
    version: str
    bundle: bytes


def build_bundle(folder: Path) -> bytes:
    """Return the app in a folder as a bundle; the same files make the same bytes."""
    return bytes(build_fab_from_disk(folder))
