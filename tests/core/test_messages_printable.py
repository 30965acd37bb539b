"""Text from clients is made printable and bounded."""

from __future__ import annotations

import logging
import math
import sys
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raceme.core.errors import PlainFormatter, printable, quoted
from raceme.core.messages import (
    LARGEST,
    InvalidReplyError,
    array_of,
    metrics_of,
    name_of,
    number_of,
    unit_of,
)


def len_of(said: object) -> str:
    """Name a test case whose value is too long for a name."""
    return type(said).__name__


ESCAPE, FORGED = "\x1b[2J", "fine\n2026-11-23 INFO all is well"
BACKWARDS, C1, SEPARATOR, HALF = "a\u202eb\u2066", "\x9b31m", "a\u2028b", "\ud800"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("plain Ünïcode ≤", "plain Ünïcode ≤"),
        (ESCAPE, "\\x1b[2J"),
        (FORGED, "fine 2026-11-23 INFO all is well"),
        (BACKWARDS, "a\\u202eb\\u2066"),
        (C1, "\\x9b31m"),
        (SEPARATOR, "a b"),
        (HALF, "\\ud800"),
        ("x\0y", "x\\x00y"),
        (7, "7"),
        (b"\x1b", "b'\\x1b'"),
    ],
)
def test_a_clients_text_is_one_printable_line(said: object, shown: str) -> None:
    assert printable(said) == shown


@given(st.text() | st.binary() | st.lists(st.integers()), st.integers(10, 400))
def test_a_line_is_short_and_steers_no_terminal(said: object, longest: int) -> None:
    line = printable(said, longest)
    assert len(line) <= longest
    assert line.isprintable()
    assert not any(unicodedata.category(letter) in ("Cc", "Cf", "Cs") for letter in line)


@pytest.mark.parametrize(
    "said", ["ab" * 15_000_000, [0] * 1_000_000, 10**6000, b"x" * 10**7], ids=len_of
)
def test_megabytes_of_text_become_a_short_line(said: object) -> None:
    assert len(printable(said)) <= 300
    assert len(quoted(said)) <= 62


def test_omitted_text_is_marked() -> None:
    assert printable("abcdef", 4) == "abc…"
    assert printable("abcd", 4) == "abcd"


def test_a_text_is_quoted_and_a_number_is_not() -> None:
    assert (quoted("4"), quoted(4)) == ("'4'", "4")


@pytest.mark.parametrize("value", [0, 1, -3.5, LARGEST, -LARGEST, math.inf])
def test_valid_numbers_are_accepted(value: float) -> None:
    assert number_of("loss", value) == value


@pytest.mark.parametrize(
    "value",
    [1.7e308, -1.7e308, math.nextafter(LARGEST, math.inf), -math.inf, 10**400, "1", None],
    ids=lambda value: (
        type(value).__name__ + str(value)[:9] if not isinstance(value, int) else "whole"
    ),
)
def test_invalid_numbers_are_refused(value: object) -> None:
    with pytest.raises(InvalidReplyError, match="'loss'"):
        number_of("loss", value)


def test_nan_is_accepted() -> None:
    assert math.isnan(number_of("loss", math.nan))


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"m" * 129: 1.0}, "a metric is called"),
        ({"loss\n": 1.0}, "a metric is called"),
        ({f"m{index}": 1.0 for index in range(1001)}, "1001 metrics"),
        ({"loss": 1e300}, "too large"),
    ],
)
def test_invalid_metrics_are_refused(record: dict[str, float], why: str) -> None:
    with pytest.raises(InvalidReplyError, match=why):
        metrics_of(record)


def test_lists_are_refused_as_metrics() -> None:
    assert metrics_of({"loss": 1, "shares": [1.0]}) == {"loss": 1.0}


@pytest.mark.parametrize("stated", ["", "a" * 129, "a\x1b", "a\n", b"a", None, 1.5, ["a"]])
def test_invalid_names_of_metrics_are_refused(stated: object) -> None:
    assert name_of(stated) is None


def test_valid_names_of_metrics_are_accepted() -> None:
    assert name_of("gerät-7") == "gerät-7"
    assert name_of(7) == "7"


def test_units_are_checked() -> None:
    assert unit_of(None) is None
    assert unit_of("µg/m³") == "µg/m³"
    for stated in ("m" * 33, "m\x1b[31m", 3, b"m"):
        with pytest.raises(InvalidReplyError, match="unit"):
            unit_of(stated)


def test_a_log_line_forges_no_other_and_steers_no_terminal() -> None:
    formatter = PlainFormatter("%(levelname)s %(message)s")
    words = f"{ESCAPE}{FORGED}{BACKWARDS}"
    record = logging.LogRecord("raceme", logging.INFO, "", 0, "said: %s", (words,), None)
    line = formatter.format(record)
    assert line.isprintable()
    assert line.startswith("INFO said: \\x1b[2Jfine 2026")
    long = logging.LogRecord("raceme", logging.INFO, "", 0, "%s", ("x" * 10**6,), None)
    assert len(formatter.format(long)) < 2100


def test_a_traceback_is_printable_line_by_line() -> None:
    try:
        raise ValueError(ESCAPE)
    except ValueError:
        error = sys.exc_info()
    record = logging.LogRecord("raceme", logging.ERROR, "", 0, "failed", (), error)
    lines = PlainFormatter("%(message)s").format(record).split("\n")
    assert all(line.isprintable() for line in lines)
    assert lines[-1] == "ValueError: \\x1b[2J"
    assert any(line.startswith("  File") for line in lines)


# Arrays.


def test_an_array_of_the_wanted_shape_and_bounds_is_returned() -> None:
    numbers = {"shares": np.array([[0.0, 1.0, 0.5]], np.float32)}
    found = array_of(numbers, "shares", (1, None), 0.0, 1.0, most=3)
    assert found.dtype == np.float64
    assert found.tolist() == [[0.0, 1.0, 0.5]]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (None, r"it must state 'shares', numbers of shape \(1, any\)"),
        (np.array([["a"]]), "it must state 'shares'"),
        (np.zeros(3), r"has shape \(3,\), not \(1, any\)"),
        (np.zeros((2, 3)), r"has shape \(2, 3\)"),
        (np.zeros((1, 0)), r"has shape \(1, 0\)"),
        (np.zeros((1, 4)), r"has shape \(1, 4\)"),
        (np.array([[0.0, 1.001]]), "is not within 0 and 1"),
        (np.array([[-0.001, 1.0]]), "is not within 0 and 1"),
    ],
)
def test_any_other_array_is_refused(values: object, reason: str) -> None:
    numbers = {} if values is None else {"shares": values}
    with pytest.raises(InvalidReplyError, match=reason):
        array_of(numbers, "shares", (1, None), 0.0, 1.0, most=3)
