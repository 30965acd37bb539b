"""Flower's objects, their store, and the sessions in which they are uploaded."""

import hashlib

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflatable_class_registry

from raceme.flower import objects
from raceme.flower.messages import identify_process
from raceme.flower.objects import (
    UPLOAD_SECONDS,
    ObjectStore,
    UploadSessions,
    check_object,
    check_tree,
    ids_of,
    object_id,
)


def tree(name: str, *children: ObjectTree) -> ObjectTree:
    return ObjectTree(object_id=name, children=children)


def held(store: ObjectStore) -> set[str]:
    return set(store._contents)


def test_trees_ids_and_types_are_flowers() -> None:
    identify_process()
    content = RecordDict(
        {"arrays": ArrayRecord([np.zeros(3), np.ones(2)]), "config": ConfigRecord({"n": 1})}
    )
    message = Message(content, 42, "train")
    flowers = get_object_tree(message)
    assert ids_of(flowers) == list(
        dict.fromkeys(node.object_id for node in iterate_object_tree(flowers))
    )
    check_tree(flowers)
    for key, found in get_all_nested_objects(message).items():
        whole = found.deflate()
        check_object(whole)
        assert object_id(whole) == get_object_id(whole) == key
    assert set(inflatable_class_registry) == objects._TYPES


def test_an_object_stays_as_long_as_a_message_has_it() -> None:
    store = ObjectStore()
    # Two messages share record b, which contains array a twice.
    shared = tree("b", tree("a"), tree("a"))
    assert store.announce(tree("m", shared)) == ["a", "b", "m"]
    store.put("a", b"1")
    assert store.announce(tree("n", shared, tree("c"))) == ["b", "c", "n"]
    assert ("m" in store, "b" in store, "x" in store) == (True, False, False)
    # Deleting an object that is not a message has no effect.
    store.delete("b")
    assert held(store) == {"a", "b", "c", "m", "n"}
    store.delete("m")
    store.delete("m")
    assert held(store) == {"a", "b", "c", "n"}
    assert store.tree("n") == tree("n", shared, tree("c"))
    store.delete("n")
    assert (held(store), len(store), dict(store._uses)) == (set(), 0, {})
    with pytest.raises(KeyError):
        store.tree("n")


def test_a_message_that_is_announced_again_is_held_once() -> None:
    store = ObjectStore()
    assert store.announce(tree("m", tree("a"))) == ["a", "m"]
    store.put("a", b"1")
    # The first announced tree stays valid.
    assert store.announce(tree("m", tree("z"))) == ["m"]
    store.delete("m")
    assert held(store) == set()


def test_a_false_tree_does_no_harm_to_other_messages() -> None:
    store = ObjectStore()
    # Record b contains array a; false trees claim that it has no child, or itself.
    store.announce(tree("m", tree("b")))
    store.announce(tree("l", tree("b", tree("b"))))
    true = tree("n", tree("b", tree("a")))
    assert store.announce(true) == ["a", "b", "n"]
    store.delete("m")
    store.delete("l")
    assert store.tree("n") == true
    assert held(store) == {"a", "b", "n"}
    store.delete("n")
    assert held(store) == set()


def test_thirty_doublings_stay_thirty_objects() -> None:
    store = ObjectStore()
    for number in range(1, 31):
        # Expanded, the last tree would have a billion objects.
        below = tree(f"x{number - 1}")
        store.announce(tree(f"x{number}", below, below))
    assert len(ids_of(store.tree("x30"))) == 2
    assert len(store) == 31


def test_expected_objects_differ_from_unknown_ones() -> None:
    store = ObjectStore()
    store.announce(tree("m", tree("a")))
    assert (store.get("a"), store.get("x")) == (b"", None)
    store.put("a", b"first")
    store.put("a", b"second")
    assert store.get("a") == b"first"


@pytest.mark.parametrize("name", ["", "a", "g" * 64, "0x" + "a" * 62, "a" * 65, "A" * 64])
def test_a_tree_with_a_wrong_id_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no id"):
        check_tree(tree("a" * 64, tree(name)))


CHILD = hashlib.sha256(b"").hexdigest()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"ArrayRecord  4", "three parts"),
        (b"ArrayRecord 4\0body", "three parts"),
        (b"Pickle  4\0body", "not known"),
        (b"ArrayRecord abc 4\0body", "children"),
        (b"ArrayRecord  5\0body", "4 bytes, not 5"),
        (b"ArrayRecord  x\0body", "invalid literal"),
        (b"\xff  4\0body", "decode"),
    ],
)
def test_an_invalid_object_is_refused(content: bytes, reason: str) -> None:
    check_object(f"ArrayRecord {CHILD},{CHILD} 4\0body".encode())
    with pytest.raises(ValueError, match=reason):
        check_object(content)


def test_a_session_ends_with_its_last_object_or_long_after_the_one_before() -> None:
    now = 0.0
    uploads = UploadSessions(lambda: now)
    session = uploads.begin("reply", ["a", "b", "c"])
    assert uploads.expecting_reply(session, "a") == "reply"
    assert uploads.expecting_reply(session, "x") is None
    assert uploads.expecting_reply("other", "a") is None
    # Older SuperNodes send no session id.
    assert uploads.expecting_reply("", "b") == "reply"
    assert uploads.expecting_reply("", "x") is None
    now = UPLOAD_SECONDS - 1
    assert not uploads.is_over("reply")
    uploads.record_push("reply", "a")
    assert uploads.expecting_reply(session, "a") is None
    now += UPLOAD_SECONDS - 1
    assert uploads.overdue("b") == []
    now += 1
    assert uploads.is_over("reply")
    assert uploads.overdue("b") == ["reply"]
    assert uploads.overdue("a") == []
    uploads.record_push("reply", "b")
    uploads.record_push("reply", "c")
    assert len(uploads) == 0
    assert not uploads.is_over("reply")


def test_a_reply_that_is_announced_again_has_a_new_session() -> None:
    uploads = UploadSessions()
    first = uploads.begin("reply", ["a"])
    second = uploads.begin("reply", ["a"])
    assert uploads.expecting_reply(first, "a") is None
    assert uploads.expecting_reply(second, "a") == "reply"
    uploads.end("reply")
    assert uploads.expecting_reply(second, "a") is None
    # With nothing to upload, no session is kept.
    uploads.begin("reply", [])
    assert len(uploads) == 0
