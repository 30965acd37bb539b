"""The state of a SuperLink with one run, that can be saved and restored."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, cast

from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.common.serde import message_from_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.constant import NodeStatus
from flwr.supercore.inflatable.inflatable_object import get_object_id

from raceme.compat.message import identify_process
from raceme.compat.message_state import MessageState, Parcel, head_of
from raceme.compat.whole import decode, encode, size_of

RECONNECT_SECONDS = 90.0
"""How long a node that was online may take to find a server that has been started again."""


class LinkState(MessageState):
    """Nodes, messages and replies, and what of them has to survive a restart."""

    reconnect = RECONNECT_SECONDS
    """Seconds that nodes which were online count as such after :meth:`load_state_dict`."""

    def admit(self, keys: Collection[bytes]) -> None:
        """Let the nodes with these public keys in, and no others: they are the registered ones."""
        with self.lock:
            for key in keys:
                if self.get_node_id_by_public_key(key) is None:
                    self.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0)
            for key, node in list(self.node_public_key_to_node_id.items()):
                if key not in keys:
                    self.delete_node(NOOP_FLWR_AID, node)

    def counts(self) -> dict[str, int]:
        """Return how many messages wait for their node, are with it, and are answered."""
        with self.lock:
            heads = list(self.message_ins_store.items())
            sent = sum(bool(head.metadata.delivered_at) for _, head in heads)
            answered = sum(self._is_answered(key) for key, _ in heads)
        return {"waiting": len(heads) - sent, "at-work": sent - answered, "answered": answered}

    def state_dict(self) -> dict[str, Any]:
        """Return all that has to survive a restart: a tree of plain values and bytes.

        Of messages that their nodes have fetched only the heads are left.
        """
        with self.lock:
            run = self.run_ids[self.run_id].run
            return {
                "run": self.run_id,
                "series": run.series_id,
                "nodes": [node.SerializeToString() for node in self.nodes.values()],
                "direct": sorted(self._direct),
                "messages": [self._message_tree(key) for key in self.message_ins_store],
                "replies": [self._reply_parcel(key) for key in self._arrived],
            }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, in a new state."""
        with self.lock:
            record = self.run_ids.pop(self.run_id)
            record.run.run_id, record.run.series_id = tree["run"], tree["series"]
            self.task_store[cast(int, record.run.primary_task_id)].run_id = tree["run"]
            self.run_id = tree["run"]
            self.run_ids[self.run_id] = record
            identify_process(self.run_id)
            for known in (self.nodes, self.node_public_key_to_node_id, self.owner_to_node_ids):
                known.clear()
            for data in tree["nodes"]:
                self._restore_node(NodeInfo.FromString(data))
            self._direct = set(tree["direct"])
            for saved in tree["messages"]:
                self._restore_message(saved)
            for parcel in tree["replies"]:
                self.receive(parcel)

    def receive(self, parcel: Parcel) -> bool:
        """Take a whole reply, as if its node had just sent it; return whether it is wanted."""
        with self.lock:
            if not parcel[0]:
                asked = parcel[1].decode()
                message = self.message_ins_store.get(asked)
                if message is None or self._is_answered(asked):
                    return False
                return self.accept(message.metadata.dst_node_id, asked, parcel[2])
            head = message_from_proto(ProtoMessage.FromString(parcel[0]))
            tree = ObjectTree.FromString(parcel[1])
            session = self.start_session(self.run_id)
            stored, missing = self.store_message_and_object_tree(head, tree, session)
            contents = {get_object_id(content): content for content in parcel[2:]}
            for object_id in missing:
                self.store_object(self.run_id, session, object_id, contents[object_id])
        return stored

    def _message_tree(self, message_id: str) -> dict[str, Any]:
        message = self.message_ins_store[message_id]
        # The objects go when the node confirms that it has them.
        whole = message_id in self.object_store
        content = None if message.metadata.delivered_at else self._contents.get(message_id)
        return {
            "delivered": message.metadata.delivered_at,
            "whole": whole,
            "body": b"" if content is None else encode(content),
            "parcel": self._parcel(message) if whole else [head_of(message)],
        }

    def _restore_node(self, node: NodeInfo) -> None:
        if node.status == NodeStatus.ONLINE:
            node.online_until = time.time() + self.reconnect
        self.nodes[node.node_id] = node
        self.node_public_key_to_node_id[node.public_key] = node.node_id
        self.owner_to_node_ids.setdefault(node.owner_aid, set()).add(node.node_id)

    def _restore_message(self, saved: Mapping[str, Any]) -> None:
        parcel = saved["parcel"]
        message = message_from_proto(ProtoMessage.FromString(parcel[0]))
        message_id, node = message.metadata.message_id, message.metadata.dst_node_id
        message.metadata.delivered_at = saved["delivered"]
        self.message_ins_store[message_id] = message
        if saved["body"]:
            content = decode(saved["body"])
            self._contents.put(message_id, content, size_of(content))
        if saved["whole"]:
            tree = ObjectTree.FromString(parcel[1])
            self.object_store.preregister(self.run_id, tree)
            for content in parcel[2:]:
                self.object_store.put(get_object_id(content), content)
        if saved["delivered"]:
            self._handed_out[node] = message_id
        else:
            self._undelivered.setdefault(node, deque()).append(message_id)

    def _reply_parcel(self, asked: str) -> Parcel:
        if asked in self._bodies:
            return [b"", asked.encode(), self._bodies[asked]]
        return self._parcel(self.message_res_store[self._arrived[asked]])
