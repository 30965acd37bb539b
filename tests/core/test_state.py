"""A method's state comes back unchanged from a checkpoint."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raceme.core.errors import UserError
from raceme.core.state import from_tree, to_tree
from raceme.core.strategy import Method


@dataclass
class Inner:
    count: int = 0
    names: set[str] = field(default_factory=set)


@dataclass
class Outer:
    inner: Inner
    seen: frozenset[int] = frozenset()
    by_cluster: dict[int, list[float]] = field(default_factory=dict)
    last: tuple[int, str] | None = None


INNERS = st.builds(Inner, st.integers(), st.sets(st.text()))
OUTERS = st.builds(
    Outer,
    INNERS,
    st.frozensets(st.integers()),
    st.dictionaries(st.integers(), st.lists(st.floats(allow_nan=False))),
    st.none() | st.tuples(st.integers(), st.text()),
)


@given(OUTERS)
def test_a_state_comes_back_as_it_was(state: Outer) -> None:
    assert from_tree(Outer, to_tree(state)) == state


class Colour(Enum):
    RED = 1


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (deque[int], r"collections.deque\[int\]"),
        (Colour, "Colour"),
        (Path, "Path"),
        (dict, "dict"),
        (list, "list"),
        (int | str, r"int \| str"),
        (dict[tuple[str, str], float], r"dict\[tuple\[str, str\], float\]"),
        (dict[str, deque[int]], r"collections.deque\[int\]"),
    ],
)
def test_a_state_that_would_not_come_back_is_refused_before_the_run(kind: Any, said: str) -> None:
    state = make_dataclass("Mine", [("held", kind, field(default=None))])
    mine = type("Own", (Method,), {"state_type": state})
    with pytest.raises(UserError, match=f"^Mine.held is {said}, which a checkpoint cannot restore"):
        mine()


def test_sets_are_written_in_order() -> None:
    assert to_tree({"names": {"b", "a", "c"}}) == {"names": ["a", "b", "c"]}


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="cannot keep a object in a state"):
        to_tree([object()])
