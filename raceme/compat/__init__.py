"""Everything private that Raceme uses of Flower, in one place.

Strategies and apps use Flower's public interface only. The simulator has to do what Flower's
SuperLink and SuperNodes do for a message, and `raceme device` speaks a SuperNode's protocol;
Flower keeps both private. When a later release moves any of it, the imports here fail, a test
says so, and this package is what has to change.

`message` is imported here; `fleet`, which brings gRPC with it, only by the device.
"""

from raceme.compat.message import (
    CLIENT_APP_RAISED_EXCEPTION,
    INVALID_APP,
    LOAD_APP_EXCEPTION,
    MESSAGE_UNAVAILABLE,
    NODE_UNAVAILABLE,
    REPLY_MESSAGE_UNAVAILABLE,
    SERVER_NODE_ID,
    Run,
    empty_run,
    error_reply,
    identify_process,
    refused,
    set_message_id,
    start_now,
)
from raceme.compat.records import array, array_record

__all__ = [
    "CLIENT_APP_RAISED_EXCEPTION",
    "INVALID_APP",
    "LOAD_APP_EXCEPTION",
    "MESSAGE_UNAVAILABLE",
    "NODE_UNAVAILABLE",
    "REPLY_MESSAGE_UNAVAILABLE",
    "SERVER_NODE_ID",
    "Run",
    "array",
    "array_record",
    "empty_run",
    "error_reply",
    "identify_process",
    "refused",
    "set_message_id",
    "start_now",
]
