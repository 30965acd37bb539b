"""Lines of the log as `--log-format json` writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raceme.core.errors import JsonFormatter


def lines_with(caplog: pytest.LogCaptureFixture, part: str) -> list[dict[str, Any]]:
    """Return the fields of all lines whose message contains a text."""
    lines = map(json.loads, map(JsonFormatter().format, caplog.records))
    return [line for line in lines if part in line["message"]]
