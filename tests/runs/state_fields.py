"""The fields of checkpointed states; as a script, write their snapshot."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from raceme.core.clusters import Clusters
from raceme.core.progress import Progress
from raceme.core.registry import FEATURES, STRATEGIES
from raceme.core.requests import Bases
from raceme.core.schedulers import RequestState, WindowState
from raceme.core.scheduling import RoundState
from raceme.core.strategy import Variant
from raceme.features.protection.guards import GuardState
from raceme.runs.checkpoints import STATE
from raceme.strategies.fedcompass import ArrivalState

SNAPSHOT = Path(__file__).with_name("state_fields.json")


def state_fields() -> dict[str, dict[str, str]]:
    """Return the fields of every state dataclass, with their types, by class name."""
    found: dict[str, dict[str, str]] = {}

    def visit(kind: Any) -> None:
        if isinstance(kind, type) and is_dataclass(kind) and kind.__qualname__ not in found:
            hints = get_type_hints(kind)
            kept = [item for item in fields(kind) if not item.metadata.get("transient")]
            found[kind.__qualname__] = {item.name: str(item.type) for item in kept}
            for item in kept:
                visit(hints[item.name])
        for part in get_args(kind):
            visit(part)

    policies = (RoundState, WindowState, RequestState, ArrivalState)
    # Features of protection are created by a factory, with one state class for all of them.
    features = [getattr(FEATURES[name], "state_type", GuardState) for name in FEATURES]
    for root in (Clusters, Bases, Progress, *policies, *features):
        visit(root)
    for name in STRATEGIES:
        method = STRATEGIES[name]
        visit((method.method if isinstance(method, Variant) else method).state_type)
    return dict(sorted(found.items()))


if __name__ == "__main__":
    text = json.dumps({"format": STATE, "fields": state_fields()}, indent=1)
    SNAPSHOT.write_text(text + "\n", encoding="utf-8")
