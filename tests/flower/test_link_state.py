"""The state of a served fleet: its rules for nodes, messages and replies."""

import time
from dataclasses import dataclass

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from raceme.flower import link_state
from raceme.flower.app import App
from raceme.flower.link_state import ClockSkew, FleetObserver, LinkState, MessageCache
from raceme.flower.messages import (
    NODE_UNAVAILABLE,
    SERVER_NODE_ID,
    identify_process,
    set_message_id,
    without_content,
)
from raceme.flower.objects import UPLOAD_SECONDS, UploadSessions


@dataclass
class Reply:
    """A reply as a SuperNode sends it: its head, its tree of objects, and the objects."""

    head: Message
    tree: ObjectTree
    objects: dict[str, bytes]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def state() -> LinkState:
    return LinkState(App("tests/none", "1.0.0", b"a bundle"))


@pytest.fixture
def clock(state: LinkState) -> Clock:
    clock = Clock()
    state._uploads = UploadSessions(clock)
    return clock


def supernode(state: LinkState, key: bytes = b"key") -> int:
    node = state.register(key)
    assert state.activate(node, 30.0)
    return node


def asked(state: LinkState, node: int, number: float = 1.0) -> Message:
    """Send a message to a node, which fetches it; return its head."""
    identify_process(state.run_id, SERVER_NODE_ID)
    content = RecordDict({"arrays": ArrayRecord([np.full(3, number)])})
    assert state.push(Message(content, node, "train", ttl=600.0)) is not None
    found = state.next_announced(node)
    assert found is not None
    return found[0]


def reply_to(message: Message, number: float = 2.0) -> Reply:
    identify_process(message.metadata.run_id, message.metadata.dst_node_id)
    content = RecordDict({"arrays": ArrayRecord([np.full(3, number)])})
    whole = Message(content, reply_to=message)
    set_message_id(whole, whole.object_id)
    objects = {key: found.deflate() for key, found in get_all_nested_objects(whole).items()}
    return Reply(without_content(whole), get_object_tree(whole), objects)


def sent(state: LinkState, reply: Reply) -> list[bool]:
    session, missing = state.announce(reply.head, reply.tree)
    return [state.put_object(session, key, reply.objects[key]) for key in missing]


def test_a_reply_is_there_once_its_last_object_is(state: LinkState) -> None:
    node = supernode(state)
    message = asked(state, node)
    reply = reply_to(message)
    session, missing = state.announce(reply.head, reply.tree)
    assert missing == list(reply.objects)
    key = message.metadata.message_id
    for part in missing:
        assert state.take({key}) == []
        assert state.put_object(session, part, reply.objects[part])
    (taken,) = state.take({key})
    (array,) = taken.content["arrays"].to_numpy_ndarrays()
    assert array.tolist() == [2.0, 2.0, 2.0]
    assert taken.metadata.message_id == reply.tree.object_id
    # No part of the exchange is kept.
    assert (state.heads, state.reply_heads, len(state.objects)) == ({}, {}, 0)
    assert len(state._uploads) == 0
    assert not state.put_object(session, part, reply.objects[part])


def test_an_observer_hears_of_messages_replies_and_nodes(state: LinkState) -> None:
    heard: list[str] = []

    class Observer(FleetObserver):
        def on_work(self, node_id: int) -> None:
            heard.append(f"work for {node_id == node}")

        def on_news(self) -> None:
            heard.append("news")

    node = supernode(state)
    state.observers += [Observer(), FleetObserver()]
    reply = reply_to(asked(state, node))
    assert heard == ["work for True"]
    sent(state, reply)
    assert heard[1:] == ["news"]
    state.deactivate(node)
    assert heard[2:] == ["news"]


def test_a_reply_that_stays_incomplete_is_given_up(state: LinkState, clock: Clock) -> None:
    message = asked(state, supernode(state))
    reply = reply_to(message)
    session, missing = state.announce(reply.head, reply.tree)
    clock.now += UPLOAD_SECONDS - 1
    assert state.put_object(session, missing[0], reply.objects[missing[0]])
    clock.now += UPLOAD_SECONDS - 1
    assert state.get_object(missing[1]) == b""
    clock.now += 1
    assert not state.put_object(session, missing[1], reply.objects[missing[1]])
    assert state.reply_heads == {}
    assert state.get_object(missing[1]) is None
    # A new reply is still accepted.
    again = reply_to(message, 3.0)
    assert all(sent(state, again))
    (taken,) = state.take({message.metadata.message_id})
    assert not taken.has_error()


def test_an_overdue_object_is_unknown(state: LinkState, clock: Clock) -> None:
    reply = reply_to(asked(state, supernode(state)))
    _, missing = state.announce(reply.head, reply.tree)
    assert state.get_object(missing[0]) == b""
    clock.now += UPLOAD_SECONDS
    assert state.get_object(missing[0]) is None


def test_an_object_that_another_reply_brings_completes_this_one_too(state: LinkState) -> None:
    first, second = (asked(state, supernode(state, key)) for key in (b"a", b"b"))
    replies = [reply_to(message) for message in (first, second)]
    shared = replies[0].objects.keys() & replies[1].objects.keys()
    assert shared
    (session, missing), (other, _) = (state.announce(each.head, each.tree) for each in replies)
    for key in missing:
        assert state.put_object(session, key, replies[0].objects[key])
    for key in replies[1].objects.keys() - shared:
        assert state.put_object(other, key, replies[1].objects[key])
    keys = {message.metadata.message_id for message in (first, second)}
    assert len(state.take(keys)) == 2
    # Both sessions ended without an error for redundant parts.
    assert len(state._uploads) == 0


def test_objects_that_are_pushed_twice_are_taken(state: LinkState) -> None:
    first, second = (asked(state, supernode(state, key)) for key in (b"a", b"b"))
    replies = [reply_to(message) for message in (first, second)]
    sessions = [state.announce(each.head, each.tree)[0] for each in replies]
    shared = replies[0].objects.keys() & replies[1].objects.keys()
    for session, reply in zip(sessions, replies, strict=True):
        for key in shared:
            assert state.put_object(session, key, reply.objects[key])


@pytest.mark.parametrize("content", [b"", b"something else", b"ArrayRecord  4\0body"])
def test_an_object_with_another_hash_is_refused(state: LinkState, content: bytes) -> None:
    reply = reply_to(asked(state, supernode(state)))
    session, missing = state.announce(reply.head, reply.tree)
    assert not state.put_object(session, missing[0], content)
    assert state.put_object(session, missing[0], reply.objects[missing[0]])


def test_a_reply_whose_tree_has_another_root_is_refused(state: LinkState) -> None:
    message = asked(state, supernode(state))
    reply = reply_to(message)
    for tree in (ObjectTree(object_id="f" * 64), ObjectTree(object_id="x")):
        with pytest.raises(ValueError, match="id"):
            state.announce(reply.head, tree)
    assert state.reply_heads == {}
    assert all(sent(state, reply))


def changed(name: str, reply: Reply, other: Message) -> None:
    stated = reply.head.metadata
    if name == "of another node":
        stated.__dict__["_src_node_id"] = 77
    elif name == "to another node":
        stated.__dict__["_dst_node_id"] = 77
    elif name == "of another run":
        stated.__dict__["_run_id"] = 77
    elif name == "to no message":
        stated.__dict__["_reply_to_message_id"] = "f" * 64
    elif name == "to another message":
        stated.__dict__["_reply_to_message_id"] = other.metadata.message_id
    elif name == "lives too long":
        stated.ttl += 10.0
    elif name == "is over":
        stated.ttl, stated.created_at = 1.0, time.time() - 2.0
    else:
        raise AssertionError(name)


@pytest.mark.parametrize(
    "name",
    [
        "of another node",
        "to another node",
        "of another run",
        "to no message",
        "to another message",
        "lives too long",
        "is over",
    ],
)
def test_a_reply_that_is_none_to_a_message_is_not_wanted(state: LinkState, name: str) -> None:
    node, neighbour = supernode(state), supernode(state, b"neighbour")
    message, other = asked(state, node), asked(state, neighbour)
    false = reply_to(message, 3.0)
    changed(name, false, other)
    assert sent(state, false) == []
    assert state.reply_heads == {}
    assert all(sent(state, reply_to(message)))
    assert len(state.take({message.metadata.message_id})) == 1


def test_a_second_reply_is_not_wanted_but_the_first_may_come_again(state: LinkState) -> None:
    node = supernode(state)
    message, later = asked(state, node), asked(state, node, 5.0)
    reply = reply_to(message)
    _, missing = state.announce(reply.head, reply.tree)
    assert sent(state, reply_to(message, 3.0)) == []
    assert state.announce(reply.head, reply.tree)[1] == missing
    assert all(sent(state, reply))
    # The same objects, under a head that claims to answer another message.
    copy = Reply(reply_to(later).head, reply.tree, reply.objects)
    set_message_id(copy.head, reply.tree.object_id)
    assert sent(state, copy) == []
    assert all(sent(state, reply_to(later)))
    keys = {each.metadata.message_id for each in (message, later)}
    assert len(state.take(keys)) == 2


def test_a_node_is_online_as_long_as_its_heartbeats_promise(
    state: LinkState, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = state.register(b"key")
    with pytest.raises(ValueError, match="already in use"):
        state.register(b"key")
    identify_process(state.run_id, SERVER_NODE_ID)
    # The node has not been online yet, so the message is refused.
    assert state.push(Message(RecordDict(), node, "train")) is None
    assert state.activate(node, 30.0)
    assert not state.activate(node, 30.0)
    assert state.online() == [node]
    # A node counts as online for two heartbeat intervals of 30 s.
    until = state.nodes[node].online_until
    assert until is not None
    assert until == pytest.approx(time.time() + 60.0, abs=5.0)
    state.nodes[node].online_until = time.time() - 0.001
    assert state.online() == []
    assert state.beat(node, 10.0)
    assert state.online() == [node]
    assert state.deactivate(node)
    assert not state.deactivate(node)
    assert state.online() == []
    # The node is known, so messages wait for its return.
    assert state.push(Message(RecordDict(), node, "train")) is not None
    state.unregister(node)
    assert not state.beat(node, 10.0)
    assert not state.activate(node, 10.0)
    assert not state.deactivate(node)
    assert state.node_of(b"key") is None


def test_a_node_that_registers_again_loses_its_work(state: LinkState) -> None:
    node = supernode(state)
    message = asked(state, node)
    state.deactivate(node)
    assert state.activate(node, 30.0)
    (reply,) = state.take({message.metadata.message_id})
    assert reply.error.code == NODE_UNAVAILABLE


def test_nodes_messages_and_replies_survive_a_restart(state: LinkState) -> None:
    node, gone = supernode(state), supernode(state, b"gone")
    never = state.register(b"never")
    answered, open_ = asked(state, node), asked(state, node, 4.0)
    sent(state, reply_to(answered))
    state.deactivate(gone)
    later = LinkState(App("tests/none", "1.0.0", b"a bundle"))
    later.load_state_dict(state.state_dict())
    assert later.run_id == state.run_id
    assert list(later.nodes) == [node, gone, never]
    assert later.online() == [node]
    assert later.nodes[never].online_until is None
    assert later.node_of(b"key") == node
    assert later.counts() == {"waiting": 0, "at-work": 1, "answered": 1}
    (reply,) = later.take({answered.metadata.message_id})
    assert not reply.has_error()
    assert all(sent(later, reply_to(open_)))
    assert later.run.run_id == state.run_id == later.run_record().run_id


def test_messages_are_refused_that_state_too_little(state: LinkState) -> None:
    node = supernode(state)
    identify_process(state.run_id, SERVER_NODE_ID)
    early = Message(RecordDict(), node, "train", ttl=1e12)
    early.metadata.created_at = link_state._EARLIEST - 1.0
    over = Message(RecordDict(), node, "train", ttl=1.0)
    over.metadata.created_at -= 2.0
    identify_process(state.run_id + 1, SERVER_NODE_ID)
    foreign = Message(RecordDict(), node, "train")
    identify_process(state.run_id, node)
    from_a_node = Message(RecordDict(), node, "train")
    for message in (early, over, foreign, from_a_node):
        assert state.push(message) is None
    assert state.heads == {}
    assert len(state.objects) == 0


def test_a_jump_of_the_clock_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wall, steady = 1000.0, 5.0
    jumps = ClockSkew(lambda: wall, lambda: steady)
    wall, steady = wall + 3600 + 1, steady + 1
    assert jumps.seconds() == 3600
    assert jumps.seconds() == 0
    assert "set forward by 3600 s" in caplog.text
    wall += 5
    assert jumps.seconds() == 0
    wall -= 7205
    assert jumps.seconds() == pytest.approx(-7200)
    assert "set back by 7200 s" in caplog.text


def test_the_latest_messages_are_kept_until_they_are_too_many_bytes() -> None:
    identify_process(1, SERVER_NODE_ID)
    content = RecordDict({"arrays": ArrayRecord([np.zeros(4, np.int8)])})
    size = content["arrays"].count_bytes()
    cache = MessageCache(most_bytes=2 * size + 1)
    sent = {name: Message(content, 1, "train") for name in "abcd"}
    for name, message in sent.items():
        cache.put(name, message)
    # Messages that wait for their node are kept, beyond the limit.
    assert all(name in cache for name in sent)
    for name in "abc":
        assert cache.hand_out(name) is sent[name]
    assert "a" not in cache
    assert cache.hand_out("a") is None
    assert cache.hand_out("b") is sent["b"]
    cache.drop("b")
    cache.drop("unknown")
    # The messages c and d are kept again, as there is space.
    assert cache.hand_out("d") is sent["d"]
    assert cache.get("c") is sent["c"]
