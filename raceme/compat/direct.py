"""A device's whole messages in one call, where the server is Raceme's too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import grpc
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPushError,
    inflate_object_from_contents,
)

from raceme.compat.parcels import FETCH, LARGEST, SEND, SERVICE, join, split


class Direct:
    """The calls of `raceme.compat.parcels`, on behalf of one node.

    Parameters
    ----------
    channel : grpc.Channel
        To the server; it signs calls.
    invoke : Callable
        Makes a call, as often as need be.
    """

    def __init__(self, channel: grpc.Channel, invoke: Callable[..., Any]) -> None:
        self._invoke = invoke
        self._fetch = channel.unary_unary(
            f"/{SERVICE}/{FETCH}", ConfirmMessageReceivedRequest.SerializeToString, split
        )
        self._send = channel.unary_unary(
            f"/{SERVICE}/{SEND}", bytes, PushMessagesResponse.FromString
        )

    def fetch(self, node_id: int, run_id: int, tree: ObjectTree) -> Message | None:
        """Return a whole message; nothing if its objects have to be fetched one by one."""
        request = ConfirmMessageReceivedRequest(
            node=Node(node_id=node_id), run_id=run_id, message_object_id=tree.object_id
        )
        contents = {get_object_id(part): part for part in self._invoke(self._fetch, request)}
        if any(node.object_id not in contents for node in iterate_object_tree(tree)):
            return None
        return cast(Message, inflate_object_from_contents(tree.object_id, contents))

    def send(self, node_id: int, reply: Message, seconds: float) -> bool:
        """Send a whole reply; return whether it was small enough for that."""
        contents = [part.deflate() for part in get_all_nested_objects(reply).values()]
        if sum(map(len, contents)) > LARGEST:
            return False
        tree = get_object_tree(reply)
        head = remove_content_from_message(reply) if reply.has_content() else reply
        request = PushMessagesRequest(
            node=Node(node_id=node_id),
            messages_list=[message_to_proto(head)],
            message_object_trees=[tree],
            clientapp_runtime_list=[seconds],
        )
        response = self._invoke(self._send, join([request.SerializeToString(), *contents]))
        if response.objects_to_push:
            refused = response.objects_to_push[0]
            raise ObjectPushError(refused, reply.metadata.run_id, response.session_id)
        return True
