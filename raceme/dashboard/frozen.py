"""The page frozen into a file: panels, script and data, without a server."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from raceme.config.errors import UserError
from raceme.dashboard.folder import ComparisonSource
from raceme.dashboard.page import script, style
from raceme.dashboard.source import RunSource

_MOST_SCORES = 250_000
"""Clients' own accuracies that are kept: 1.3 MB of text."""
_MOST_POSITIONS = 100_000
"""Positions on the map that are kept: 1 MB."""
_MOST_BYTES = 30_000_000
"""A file with more is nothing that one opens; `raceme watch` shows such a run."""


@dataclass(frozen=True)
class Frozen:
    """What a template needs to hold the panels.

    Attributes
    ----------
    style, script : Markup
        What stands in ``<style>`` and ``<script>``.
    data : Markup
        JSON for a ``<script>`` of that type.
    policy : str
        The page's content security policy: this script and no other, and no network.
    """

    style: Markup
    script: Markup
    data: Markup
    policy: str


def frozen_run(folder: Path) -> Frozen | None:
    """Freeze the page of a run; None if it is too large for a file.

    Raises
    ------
    UserError
        The folder cannot be read.
    """
    source = RunSource(folder, most_scores=_MOST_SCORES, most_positions=_MOST_POSITIONS)
    source.read_all()
    return _frozen(source.pieces)


def frozen_comparison(folder: Path) -> Frozen | None:
    """Freeze the page of a comparison, as :func:`frozen_run` does that of a run."""
    source = ComparisonSource(folder)
    while source.poll():
        pass
    if source.trouble:
        raise UserError(source.trouble)
    return _frozen(source.pieces)


def _frozen(pieces: Sequence[str]) -> Frozen | None:
    if sum(map(len, pieces)) > _MOST_BYTES:
        return None
    # JSON may write any letter as its number: no text in it ends the element that it stands in.
    data = "[" + ",".join(pieces).replace("<", "\\u003c") + "]"
    program = script()
    digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
    # Figures have their colours in attributes.
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return Frozen(Markup(style()), Markup(program), Markup(data), policy)
