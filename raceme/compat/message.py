"""What the simulator needs of Flower to do a SuperLink's and a SuperNode's part for a message."""

from __future__ import annotations

import time

from flwr.app import Error, Message
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

__all__ = [
    "CLIENT_APP_RAISED_EXCEPTION",
    "INVALID_APP",
    "LOAD_APP_EXCEPTION",
    "MESSAGE_UNAVAILABLE",
    "NODE_UNAVAILABLE",
    "REPLY_MESSAGE_UNAVAILABLE",
    "SERVER_NODE_ID",
    "Run",
    "empty_run",
    "error_reply",
    "identify_process",
    "refused",
    "set_message_id",
    "start_now",
]

SERVER_NODE_ID = SUPERLINK_NODE_ID
CLIENT_APP_RAISED_EXCEPTION = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
INVALID_APP = ErrorCode.INVALID_FAB
LOAD_APP_EXCEPTION = ErrorCode.LOAD_CLIENT_APP_EXCEPTION
MESSAGE_UNAVAILABLE = ErrorCode.MESSAGE_UNAVAILABLE
NODE_UNAVAILABLE = ErrorCode.NODE_UNAVAILABLE
REPLY_MESSAGE_UNAVAILABLE = ErrorCode.REPLY_MESSAGE_UNAVAILABLE


def identify_process(run_id: int = 1, node_id: int = SERVER_NODE_ID, task_id: int = 1) -> None:
    """Say on whose behalf this process creates messages.

    Flower reads run, sender and task of a new message from a process-wide place that its own
    runtime fills in; without it ``Message(...)`` raises.
    """
    TaskIdentity.run_id = run_id
    TaskIdentity.node_id = node_id
    TaskIdentity.task_id = task_id


def set_message_id(message: Message, message_id: str) -> None:
    """Give a message the id under which it is pulled; Flower's SuperLink does this."""
    message.metadata.__dict__["_message_id"] = message_id


def start_now(message: Message) -> None:
    """Let a message's time to live begin now, on the wall clock.

    A reply's time to live is what is left of the message's. In the simulator a message waits for
    its turn to be computed, which must not use it up.
    """
    message.metadata.created_at = time.time()


def error_reply(message: Message, code: int, reason: str) -> Message:
    """Answer a message with Flower's error reply."""
    start_now(message)
    return Message(Error(code, reason), reply_to=message)


def refused(reply: Message, reason: str) -> Message:
    """Return a reply as an error, as if its client had said that it could not do its work."""
    error = Error(ErrorCode.UNKNOWN, reason)
    refusal: Message = Message(error=error, metadata=reply.metadata)  # type: ignore[call-overload]
    return refusal


def empty_run(run_id: int = 1) -> Run:
    """Return the run information of a simulation."""
    return Run.create_empty(run_id)
