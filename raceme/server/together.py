"""Several collections seen as one, without a copy of any."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain


class Together(Collection[str]):
    """What is in any of some collections that have nothing in common.

    Parameters
    ----------
    *parts : Collection[str]
        The collections; what changes in them shows here.
    """

    def __init__(self, *parts: Collection[str]) -> None:
        self._parts = parts

    def __contains__(self, item: object) -> bool:
        return any(item in part for part in self._parts)

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self._parts)

    def __len__(self) -> int:
        return sum(map(len, self._parts))
