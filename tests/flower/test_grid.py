"""Incomplete replies, on Flower's own link state and object store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.servicer.runtime import runtime_handlers

try:  # Flower's name for it until 1.39.
    from flwr.server.superlink.fleet.message_handler import message_handler
except ModuleNotFoundError:
    from flwr.superlink.servicer.fleet import fleet_handlers as message_handler

from raceme.core.timeline import WallTimeline, timeline_of
from raceme.flower.grid import PromptGrid, prompt
from raceme.flower.messages import identify_process


class Client:
    """Flower's HTTP client without HTTP: it calls the SuperLink's handlers."""

    def __init__(self, state: InMemoryLinkState, run_id: int) -> None:
        self.state, self.embedding = state, 0
        (self.task,) = state.get_tasks()
        self.run_id = run_id

    def PushMessages(self, request: Any) -> Any:  # noqa: N802
        return runtime_handlers.push_messages(request, self.state, self.task)

    def PullMessages(self, request: Any) -> Any:  # noqa: N802
        return runtime_handlers.pull_messages(request, self.state, self.task)

    def PushObject(self, request: Any) -> Any:  # noqa: N802
        return runtime_handlers.push_object(request, self.state, self.task)

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        self.embedding += 1
        return runtime_handlers.pull_object(request, self.state, self.task)

    def ConfirmMessageReceived(self, request: Any) -> Any:  # noqa: N802
        return runtime_handlers.confirm_message_received(request, self.state, self.task)


@dataclass
class Link:
    """A SuperLink with a run and nodes, and the grid of its server app."""

    nodes: list[int]
    state: InMemoryLinkState
    grid: PromptGrid
    client: Client
    now: list[float] = field(default_factory=lambda: [0.0])
    asked: dict[str, Message] = field(default_factory=dict)

    def ask(self, node: int) -> str:
        """Send a node a message; return its id."""
        message = Message(RecordDict({"config": ConfigRecord({"n": 1})}), node, "train", ttl=3600.0)
        key = next(iter(self.grid.push_messages([message])))
        self.asked[key] = remove_content_from_message(message)
        return key

    def answer(self, key: str, node: int, parts: int | None = None) -> list[str]:
        """Announce a reply, and upload some of its parts; return the ids of the others."""
        identify_process(self.client.run_id, node, 1)
        arrays = {f"w{index}": Array(np.full(3, float(index), np.float32)) for index in range(3)}
        content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"n": 1})}
        reply = Message(RecordDict(content), reply_to=self.asked[key])
        identify_process(self.client.run_id, SUPERLINK_NODE_ID, 1)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            self.objects = {k: v.deflate() for k, v in get_all_nested_objects(reply).items()}
            head = message_to_proto(remove_content_from_message(reply))
            request = PushMessagesRequest(
                node=Node(node_id=node),
                messages_list=[head],
                message_object_trees=[get_object_tree(reply)],
            )
        pushed = message_handler.push_messages(request, self.state)
        self.session = pushed.session_id
        left = list(pushed.objects_to_push)
        for part in left[:parts]:
            self.upload(part)
        return [] if parts is None else left[parts:]

    def upload(self, part: str) -> None:
        """Upload one part of the last announced reply."""
        request = PushObjectRequest(
            node=Node(node_id=1),
            run_id=self.client.run_id,
            object_id=part,
            object_content=self.objects[part],
            session_id=self.session,
        )
        assert message_handler.push_object(request, self.state).stored


@pytest.fixture
def link() -> Iterator[Link]:
    state = InMemoryLinkState(NoOpFederationManager(), InMemoryObjectStore())
    run_id = state.create_run(
        None, None, None, {}, NOOP_FEDERATION_ID, None, "aid", TaskType.SERVER_APP
    )
    (task,) = state.get_tasks()
    assert state.claim_task(task.task_id)
    assert state.activate_task(task.task_id)
    nodes = []
    for index in range(3):
        node = state.create_node("aid", "name", b"key%d" % index, 30.0)
        assert state.activate_node(node, 1e6)
        nodes.append(node)
    now = [0.0]
    http = HttpGrid(insecure=True, token="any")
    client = Client(state, run_id)
    http._client = client
    http.set_run(state.get_run_info(run_ids=[run_id])[0])
    identify_process(run_id, SUPERLINK_NODE_ID, 1)
    yield Link(nodes, state, PromptGrid(http, clock=lambda: now[0]), client, now)
    identify_process()


def test_a_complete_reply_does_not_wait_for_an_incomplete_one(link: Link) -> None:
    slow, fast, silent = map(link.ask, link.nodes)
    link.answer(slow, link.nodes[0], parts=2)
    link.answer(fast, link.nodes[1])
    (reply,) = link.grid.pull_messages([slow, fast, silent])
    assert reply.metadata.reply_to_message_id == fast
    assert sorted(reply.content["arrays"]) == ["w0", "w1", "w2"]
    assert list(link.grid.pull_messages([slow, silent])) == []


def test_the_missing_part_of_a_reply_is_fetched_when_it_has_arrived(link: Link) -> None:
    slow = link.ask(link.nodes[0])
    kept = len(link.state.object_store)
    left = link.answer(slow, link.nodes[0], parts=3)
    for part in left:
        assert list(link.grid.pull_messages([slow])) == []
        link.upload(part)
    (reply,) = link.grid.pull_messages([slow])
    assert reply.metadata.reply_to_message_id == slow
    assert reply.metadata.src_node_id == link.nodes[0]
    assert float(reply.content["arrays"]["w2"].numpy().sum()) == 6.0
    # The SuperLink keeps no part of a confirmed reply.
    assert len(link.state.object_store) == kept
    assert list(link.grid.pull_messages([])) == []


def test_received_parts_are_not_fetched_again(link: Link) -> None:
    slow = link.ask(link.nodes[0])
    left = link.answer(slow, link.nodes[0], parts=4)
    for _ in range(20):
        assert list(link.grid.pull_messages([slow])) == []
    # Each poll requests a batch of missing parts, and another one if the first brought some.
    assert link.client.embedding <= 4 + (20 + 4) * min(8, len(left))


def test_a_reply_that_stays_incomplete_is_an_error(link: Link) -> None:
    slow, fast = map(link.ask, link.nodes[:2])
    left = link.answer(slow, link.nodes[0], parts=1)
    assert list(link.grid.pull_messages([slow, fast])) == []
    link.now[0] = 59.0
    link.upload(left[0])
    for _ in range(len(left)):
        assert list(link.grid.pull_messages([slow, fast])) == []
    link.now[0] = 59.0 + 59.0
    assert list(link.grid.pull_messages([slow, fast])) == []
    link.now[0] = 59.0 + 60.0
    (reply,) = link.grid.pull_messages([slow, fast])
    assert reply.has_error()
    assert "has not arrived within 60 s" in reply.error.reason
    assert reply.metadata.reply_to_message_id == slow
    assert reply.metadata.src_node_id == link.nodes[0]


def test_a_reply_whose_missing_part_the_superlink_has_dropped_is_an_error(link: Link) -> None:
    slow = link.ask(link.nodes[0])
    link.answer(slow, link.nodes[0], parts=1)
    assert list(link.grid.pull_messages([slow])) == []
    link.state.object_store.clear()
    (reply,) = link.grid.pull_messages([slow])
    assert reply.has_error()
    assert "lost" in reply.error.reason


def test_a_message_that_is_given_up_is_forgotten(link: Link) -> None:
    slow = link.ask(link.nodes[0])
    link.answer(slow, link.nodes[0], parts=1)
    clock = timeline_of(link.grid)
    assert isinstance(clock, WallTimeline)
    assert clock.wait([slow], until=0.0) == []
    before = link.client.embedding
    clock.forget([slow])
    assert clock.wait([], until=0.0) == []
    assert link.client.embedding == before
    assert not link.grid._uploads


def test_a_reply_that_says_it_is_another_clients_is_an_error(link: Link) -> None:
    mine, other = map(link.ask, link.nodes[:2])
    # The SuperLink has checked the announcement, but the uploaded object claims another source.
    link.answer(other, link.nodes[1])
    stated = dict(link.objects)
    assert [r.has_error() for r in link.grid.pull_messages([other])] == [False]
    link.answer(mine, link.nodes[0], parts=0)
    upload = link.grid
    upload._take_announced([mine])
    announced = upload._uploads[mine]
    foreign = next(k for k, v in stated.items() if v.startswith(b"Message"))
    announced.message_id, announced.contents = foreign, stated
    announced.missing.clear()
    (reply,) = upload.pull_messages([mine])
    assert reply.has_error()
    assert "differs from its announcement" in reply.error.reason
    assert reply.metadata.src_node_id == link.nodes[0]


@pytest.mark.parametrize("kind", ["Message", "RecordDict", "ArrayRecord", "MetricRecord", "Array"])
def test_a_reply_that_cannot_be_read_is_an_error(link: Link, kind: str) -> None:
    bad, good = map(link.ask, link.nodes[:2])
    link.answer(bad, link.nodes[0], parts=0)
    link.grid._take_announced([bad])
    announced = link.grid._uploads[bad]
    announced.contents = dict(link.objects)
    announced.missing.clear()
    for part, content in link.objects.items():
        if content.startswith(kind.encode() + b" "):
            head, _, body = content.partition(b"\0")
            announced.contents[part] = head + b"\0" + b"\xff\x1b" * len(body)
    link.answer(good, link.nodes[1])
    replies = {r.metadata.reply_to_message_id: r for r in link.grid.pull_messages([bad, good])}
    assert replies[bad].has_error()
    assert not replies[good].has_error()


def test_only_flowers_grid_over_http_is_wrapped(link: Link) -> None:
    assert prompt(link.grid) is link.grid
    assert isinstance(prompt(link.grid._grid), PromptGrid)


def test_messages_are_sent_and_their_replies_awaited(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = Message(RecordDict(), link.nodes[0], "query", ttl=3600.0)

    def answer_meanwhile(seconds: float) -> None:
        key = message.metadata.message_id
        link.asked[key] = message
        link.answer(key, link.nodes[0])

    monkeypatch.setattr("time.sleep", answer_meanwhile)
    (reply,) = link.grid.send_and_receive([message])
    assert not reply.has_error()


def test_every_part_that_arrives_is_progress(link: Link) -> None:
    slow = link.ask(link.nodes[0])
    *left, last = link.answer(slow, link.nodes[0], parts=0)
    assert len(left) > 8
    for part in reversed(left):
        link.now[0] += 59.0
        link.upload(part)
        assert not any(link.grid.pull_messages([slow]) for _ in left)
    link.upload(last)
    assert not next(r for _ in left for r in link.grid.pull_messages([slow])).has_error()
