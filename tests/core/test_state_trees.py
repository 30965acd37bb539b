"""What a method's state may hold: it comes back from a checkpoint as it was."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raceme.core.scheduling import from_tree, to_tree


@dataclass
class Inner:
    count: int = 0
    names: set[str] = field(default_factory=set)


@dataclass
class Outer:
    inner: Inner
    seen: frozenset[int] = frozenset()
    by_cluster: dict[int, list[float]] = field(default_factory=dict)


INNERS = st.builds(Inner, st.integers(), st.sets(st.text()))
OUTERS = st.builds(
    Outer,
    INNERS,
    st.frozensets(st.integers()),
    st.dictionaries(st.integers(), st.lists(st.floats(allow_nan=False))),
)


@given(OUTERS)
def test_a_state_comes_back_as_it_was(state: Outer) -> None:
    assert from_tree(Outer, to_tree(state)) == state


def test_sets_are_written_in_order() -> None:
    assert to_tree({"names": {"b", "a", "c"}}) == {"names": ["a", "b", "c"]}


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="cannot keep a object in a state"):
        to_tree([object()])
