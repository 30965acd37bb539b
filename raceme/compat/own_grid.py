"""What every grid of ours has alike."""

from __future__ import annotations

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid


class OwnGrid(Grid):
    """A grid that is not one of Flower's."""

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message; ``Message(...)`` does the same."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)
