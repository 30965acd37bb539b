"""The map of the clients, by similarity of their models, for `raceme watch`."""

from __future__ import annotations

from dataclasses import dataclass

from raceme.core.options import option

POSITIONS = "positions.jsonl"
"""The file with the positions, in the folder of a run."""
FILES = (POSITIONS,)
"""Files that the feature writes into the folder of a run."""


@dataclass(frozen=True)
class Options:
    """Switches the map on."""

    client_map: bool = option(
        True, "record the positions of clients for the map of `raceme watch`", affects_results=False
    )
