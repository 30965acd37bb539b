"""Who is who among clients that are not greeted: a node, until a reply states an id."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from flwr.app import RecordDict

from raceme.protocol.messages import CLIENT_ID


class Names:
    """The names of clients: those that the loop uses, and those that they state themselves.

    The loop knows a client by its node from the moment it is connected. A client that states an id
    is reported by that; if the same id comes from another node later, the device has started anew,
    and the client goes on there as the one that it was.

    Attributes
    ----------
    stated : dict[str, str]
        Name in the loop to the id that the client states.
    mistaken : set[str]
        Names of nodes that turned out to be other clients.
    moved : set[int]
        Nodes that have to be greeted again, under another name.
    """

    def __init__(self) -> None:
        self._of_node: dict[int, str] = {}
        self._by_id: dict[str, str] = {}
        self.stated: dict[str, str] = {}
        self.mistaken: set[str] = set()
        self.moved: set[int] = set()

    def of(self, node: int) -> str:
        """Return the name of the client on a node."""
        return self._of_node.setdefault(node, f"node-{node}")

    def hear(self, node: int, content: RecordDict, online: Callable[[], Iterable[int]]) -> str:
        """Take note of the id that a reply states, if it does.

        Parameters
        ----------
        node : int
            Where the reply comes from.
        content : RecordDict
            It.
        online : Callable
            Returns the nodes that are connected.

        Returns
        -------
        str
            Why the reply cannot be used: it comes from another client than was known; empty if it
            can.
        """
        stated = _id_of(content)
        if stated is None:
            return ""
        own = self.of(node)
        known = self._by_id.setdefault(stated, own)
        if known == own:
            self.stated.setdefault(own, stated)
            return ""
        elsewhere = [n for n, name in self._of_node.items() if name == known and n != node]
        if not set(elsewhere).isdisjoint(online()):
            return f"it states the id '{stated}' of a client that is online elsewhere"
        for other in elsewhere:
            del self._of_node[other]
        self._of_node[node] = known
        self.mistaken.add(own)
        self.moved.add(node)
        return f"it is '{stated}', who is known: it goes on as that"

    def shown(self, event: Any) -> Any:
        """Return a report in which clients have the names that they state."""
        return self.told(event) if self.stated else event

    def told(self, value: Any) -> Any:
        """Replace the loop's names in a report, or in a part of one."""
        if isinstance(value, str):
            return self.stated.get(value, value)
        if isinstance(value, Mapping):
            return {self.told(key): self.told(each) for key, each in value.items()}
        if isinstance(value, tuple) and type(value) is tuple:
            return tuple(map(self.told, value))
        if is_dataclass(value) and not isinstance(value, type):
            changed = {}
            for item in fields(value):
                before = getattr(value, item.name)
                if isinstance(before, str | Mapping):
                    changed[item.name] = self.told(before)
            return replace(value, **changed)
        return value


def _id_of(content: RecordDict) -> str | None:
    """Return the id that a reply states, if it is one."""
    for record in content.config_records.values():
        stated = record.get(CLIENT_ID)
        if isinstance(stated, str) and stated.isprintable() and 1 <= len(stated) <= 128:
            return stated
    return None
