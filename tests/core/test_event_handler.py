"""Events reach the method of their kind."""

from __future__ import annotations

import pytest

from raceme.core.events import (
    ClientJoined,
    ClientLeft,
    EventHandler,
    Observer,
    RunEnded,
    UpdateRejected,
)


class _Log(EventHandler):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_client_left(self, event: ClientLeft) -> str:
        self.lines.append(f"{event.client} left")
        return event.client

    def on_run_ended(self, event: RunEnded) -> None:
        self.lines.append(event.reason)


class _Louder(_Log):
    def on_client_joined(self, event: ClientJoined | UpdateRejected) -> None:
        self.lines.append(f"{event.client}!")

    on_update_rejected = on_client_joined


def test_each_kind_of_event_has_its_method_and_others_pass() -> None:
    log = _Log()
    assert log(ClientLeft(1.0, "a")) == "a"
    assert log(UpdateRejected(1.0, "a", "late", 0.0)) is None
    log(RunEnded(2.0, 5, "limit"))
    assert log.lines == ["a left", "limit"]


def test_a_subclass_adds_methods_and_two_kinds_share_one() -> None:
    log = _Louder()
    observe: Observer = log
    observe(UpdateRejected(1.0, "a", "late", 0.0))
    observe(ClientLeft(2.0, "b"))
    assert log.lines == ["a!", "b left"]


def test_a_misspelt_method_is_refused() -> None:
    with pytest.raises(TypeError, match=r"_Wrong handles .*'on_update_aplied'"):

        class _Wrong(EventHandler):
            def on_update_aplied(self, event: object) -> None: ...
