"""Messages with their content, as long as they may be asked for."""

from __future__ import annotations

from flwr.app import Message

MOST_BYTES = 64 * 1024 * 1024
"""Bytes of arrays that are kept of messages that were handed out already."""


class Contents:
    """Whole messages by their ids.

    A message that was handed out is kept in case that it gets lost on its way: the latest of them,
    up to so many bytes. Of the others nothing is known any more but that they were sent.

    Parameters
    ----------
    most_bytes : int
        Bytes of arrays that are kept of messages that were handed out.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._waiting: dict[str, tuple[Message, int]] = {}
        self._handed_out: dict[str, tuple[Message, int]] = {}
        self._bytes = 0

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._waiting or message_id in self._handed_out

    def put(self, message_id: str, message: Message, size: int) -> None:
        """Keep a message, whose arrays have so many bytes, until it is handed out."""
        self._waiting[message_id] = (message, size)

    def get(self, message_id: str) -> Message | None:
        """Return a message."""
        found = self._waiting.get(message_id) or self._handed_out.get(message_id)
        return None if found is None else found[0]

    def hand_out(self, message_id: str) -> Message | None:
        """Return a message that is on its way from now on."""
        found = self._waiting.pop(message_id, None)
        if found is None:
            return self.get(message_id)
        self._handed_out[message_id] = found
        self._bytes += found[1]
        while self._bytes > self._most:
            self.drop(next(iter(self._handed_out)))
        return found[0]

    def drop(self, message_id: str) -> None:
        """Forget a message."""
        self._waiting.pop(message_id, None)
        found = self._handed_out.pop(message_id, None)
        if found is not None:
            self._bytes -= found[1]
