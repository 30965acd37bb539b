"""The format number of checkpoints is raised whenever a state changes."""

from __future__ import annotations

import json

from state_fields import SNAPSHOT, state_fields

from raceme.runs.checkpoints import STATE


def test_a_changed_state_needs_a_new_format_number() -> None:
    """After a change: raise STATE, then run `python tests/runs/state_fields.py`.

    The state of a new method only needs the second step.
    """
    written = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    now = state_fields()
    kept = written["fields"].keys() & now.keys()
    changed = {name for name in kept if written["fields"][name] != now[name]}
    assert not changed, "STATE in raceme/runs/checkpoints.py is to be raised"
    assert (written["format"], written["fields"]) == (STATE, now)
