"""Untrusted text becomes one printable line; log lines about a device name it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import raceme
from raceme.core.errors import UserError, plain, plural


@pytest.mark.parametrize(
    ("text", "shown"),
    [("µ ok", "µ ok"), ("a\nb\x1b\x9b", "a b\\x1b\\x9b"), ("\u202e\ud800", "\\u202e\\ud800")],
)
def test_what_a_user_is_told_is_one_printable_line(text: str, shown: str) -> None:
    assert plain(text) == shown
    assert str(UserError(text)) == shown


KINDS = ("strategy", "dataset", "partition", "model", "attack", "protection", "devices", "drift")


@pytest.mark.parametrize("kind", KINDS)
def test_a_definition_of_a_script_is_called_by_its_own_name(kind: str) -> None:
    """A class that a script defines, and that is invalid for the option."""
    useless = type("Useless", (), {"__module__": "__main__"})
    given = {"strategy": "fedasync", "dataset": "digits", "clients": 2, "workers": 0, kind: useless}
    with pytest.raises(UserError, match="'Useless'") as caught:
        raceme.run(given.pop("strategy"), **given)
    assert "main-" not in str(caught.value)


ROOT = Path(__file__).parents[2] / "raceme"
ROOMS = ("core", "strategies", "flower", "fleet")
OF_THE_DEVICE = {"device.py", "tasks.py"}
"""Log lines of these files are about the device itself, whose name the formatter adds."""
LEVELS = {"debug", "info", "warning", "error", "log"}
NAMES = {"client", "client_id", "device", "node", "node_id"}
MODULES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def lines_about_devices(path: Path) -> list[ast.Call]:
    """Return the calls that log a device's name."""
    return [
        call
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.value.id, call.func.attr in LEVELS) == ("log", True)
        and any(
            getattr(argument, "id", getattr(argument, "attr", "")) in NAMES
            for argument in call.args
        )
    ]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_line_that_names_a_device_has_it_as_a_field(path: Path) -> None:
    if path.name not in OF_THE_DEVICE:
        calls = lines_about_devices(path)
        without = [c.lineno for c in calls if not any(k.arg == "extra" for k in c.keywords)]
        assert without == []


def test_one_is_singular() -> None:
    assert [plural(count, "sample") for count in (0, 1, 1000)] == [
        "0 samples",
        "1 sample",
        "1,000 samples",
    ]
