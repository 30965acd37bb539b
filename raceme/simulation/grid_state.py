"""Messages and records as trees of plain values, for checkpoints of a virtual grid."""

from __future__ import annotations

from typing import Any

from flwr.app import Error, Message, RecordDict

from raceme import compat
from raceme.simulation.transfer import Packed, pack, unpack

Tree = dict[str, Any]


def records_to_tree(records: RecordDict) -> Tree:
    """Take records apart; arrays' data are not copied."""
    packed = pack(records)
    return {"records": packed.records, "data": packed.data}


def records_from_tree(tree: Tree) -> RecordDict:
    """Put records together again."""
    records = [(name, kind, _content(content)) for name, kind, content in tree["records"]]
    return unpack(Packed(records, tree["data"]))


def message_to_tree(message: Message) -> Tree:
    """Take a message apart that has no reply yet."""
    metadata = message.metadata
    return {
        "id": metadata.message_id,
        "node": metadata.dst_node_id,
        "type": metadata.message_type,
        "ttl": metadata.ttl,
        "group": metadata.group_id,
        "content": records_to_tree(message.content),
    }


def message_from_tree(tree: Tree) -> Message:
    """Put a message together again, with its id."""
    return _message(tree, records_from_tree(tree["content"]))


def reply_to_tree(reply: Message) -> Tree:
    """Take a reply apart."""
    metadata = reply.metadata
    failed = reply.has_error()
    return {
        "id": metadata.reply_to_message_id,
        "node": metadata.src_node_id,
        "type": metadata.message_type,
        "ttl": metadata.ttl,
        "group": metadata.group_id,
        "error": [reply.error.code, reply.error.reason] if failed else None,
        "content": None if failed else records_to_tree(reply.content),
    }


def reply_from_tree(tree: Tree) -> Message:
    """Put a reply together again."""
    asked = _message(tree, RecordDict())
    if tree["error"] is not None:
        return Message(Error(*tree["error"]), reply_to=asked, ttl=tree["ttl"])
    return Message(records_from_tree(tree["content"]), reply_to=asked, ttl=tree["ttl"])


def _message(tree: Tree, content: RecordDict) -> Message:
    message = Message(content, tree["node"], tree["type"], ttl=tree["ttl"], group_id=tree["group"])
    compat.set_message_id(message, tree["id"])
    return message


def _content(content: Any) -> Any:
    """Return a record's content, or of an array record tuples with the arrays' shapes as such."""
    if isinstance(content, dict):
        return content
    return [(key, dtype, tuple(shape), *rest) for key, dtype, shape, *rest in content]
