"""The command that repeats a run, from its configuration."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

import tomli_w

from raceme.config import AUTO, Value, parse_assignment

_OPTIONS = (
    "strategy",
    "dataset",
    "data-root",
    "model",
    "clients",
    "partition",
    "devices",
    "max-updates",
    "max-time",
    "target-accuracy",
    "eval-every",
    "seed",
)
"""Keys that are shown as options of their own, in this order; the others follow --set."""
_NEVER = ("out", "resume", "strategy", "dataset", "seed")
"""Keys of the folder, and keys that are always shown."""


def repeat_command(config: Mapping[str, Value], defaults: Mapping[str, Value]) -> str:
    """Return the command that makes a run again, with all keys that are not the defaults.

    Parameters
    ----------
    config : Mapping[str, Value]
        The resolved keys of the run.
    defaults : Mapping[str, Value]
        The keys' defaults.
    """
    differing = {
        name: value
        for name, value in config.items()
        if name not in _NEVER and value not in (defaults.get(name), AUTO)
    }
    shown = {name: config[name] for name in ("strategy", "dataset", "seed") if name in config}
    shown |= differing
    words = ["raceme", "run"]
    for name in _OPTIONS:
        if name in shown:
            words += [f"--{name}", _plain(shown.pop(name))]
    for name, value in shown.items():
        words += ["--set", assignment(name, value)]
    return shlex.join(words)


def assignment(name: str, value: Value) -> str:
    """Return what is typed after --set for a key to have a value."""
    plain = f"{name}={_plain(value)}"
    if parse_assignment(plain)[1] == value:
        return plain
    return tomli_w.dumps({"value": value}).strip().replace("value = ", f"{name}=", 1)


def _plain(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
