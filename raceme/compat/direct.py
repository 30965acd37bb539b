"""A device's calls at a server that is Raceme's too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import grpc
from flwr.app import Message
from flwr.common.serde import message_from_proto
from flwr.proto.fleet_pb2 import PullMessagesResponse
from flwr.proto.message_pb2 import ObjectTree

from raceme import __version__
from raceme.compat.parcels import split
from raceme.compat.whole import decode, encode, size_of
from raceme.compat.wire import (
    GREET,
    LARGEST,
    LONGEST_WAIT,
    NEXT,
    PROTOCOL,
    SEND,
    SERVICE,
    Greeting,
    NextRequest,
    SendRequest,
)

_SLACK_SECONDS = 5.0
"""How much longer than its patience a request for work may take."""


class Direct:
    """The calls of `raceme.compat.wire`, on behalf of one node.

    Parameters
    ----------
    channel : grpc.Channel
        To the server; it signs calls.
    invoke : Callable
        Makes a call, as often as need be.
    wait_for : Callable
        Waits for the end of a call; returns whether it has come, not a reason to stop.

    Attributes
    ----------
    waited : bool
        The last request for work has waited at the server in vain.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        invoke: Callable[..., Any],
        wait_for: Callable[[grpc.Future], bool],
    ) -> None:
        self._invoke, self._wait_for = invoke, wait_for
        self._greeting = channel.unary_unary(f"/{SERVICE}/{GREET}")
        self._next = channel.unary_unary(f"/{SERVICE}/{NEXT}")
        self._send = channel.unary_unary(f"/{SERVICE}/{SEND}")
        self._have = ""
        self.waited = False

    def greet(self) -> bool:
        """Greet the server; return whether it is Raceme's."""
        return bool(self._invoke(self._greet, Greeting(PROTOCOL, __version__).to_bytes()))

    def _greet(self, request: bytes, timeout: float | None = None) -> bool:
        try:
            self._greeting(request, timeout=timeout)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            return False
        return True

    def next(self, node_id: int, patience: float) -> tuple[Message, ObjectTree | None] | None:
        """Return the next message: whole, or its head and the tree of its objects."""
        patience = min(max(patience, 0.0), LONGEST_WAIT)
        request = NextRequest(node_id, patience, self._have).to_bytes()
        answer = self._invoke(self._ask, request, timeout=patience + _SLACK_SECONDS)
        parts = split(answer) if answer is not None else []
        self.waited = answer is not None and not parts
        if not parts:
            return None
        form, data = parts
        if form == b"whole":
            message, tree = decode(data), None
        else:
            pulled = PullMessagesResponse.FromString(data)
            message, tree = message_from_proto(pulled.messages_list[0]), pulled
        self._have = message.metadata.message_id
        return message, None if tree is None else tree.message_object_trees[0]

    def _ask(self, request: bytes, timeout: float | None = None) -> bytes | None:
        call = self._next.future(request, timeout=timeout)
        if not self._wait_for(call):
            return None
        return cast(bytes, call.result())

    def send(self, node_id: int, reply: Message) -> bool:
        """Send a whole reply; return whether it was small enough for that."""
        if size_of(reply) > LARGEST:
            return False
        asked = reply.metadata.reply_to_message_id
        self._invoke(self._send, SendRequest(node_id, asked, encode(reply)).to_bytes())
        return True
