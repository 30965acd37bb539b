"""A Flower Grid on virtual time: deterministic discrete-event simulation of a fleet."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import (
    ConfigRecord,
    Context,
    Message,
    MessageType,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from raceme import compat
from raceme.compat import Run
from raceme.messages import COMPUTE_SCALE, CONFIG, LOCAL_EPOCHS
from raceme.simulation.devices import Device
from raceme.simulation.executor import Executor, InProcess
from raceme.simulation.grid_state import (
    message_from_tree,
    message_to_tree,
    records_from_tree,
    records_to_tree,
    reply_from_tree,
    reply_to_tree,
)

Value = str | int | float | bool


@dataclass(frozen=True)
class Node:
    """One simulated SuperNode.

    Attributes
    ----------
    node_id : int
        Flower's id of the node.
    device : Device
        How fast it is, and when it is online.
    config : Mapping[str, Value]
        Flower's node config, e.g. ``{"partition-id": 3, "num-partitions": 40}``.
    examples : int
        Training examples, for devices whose speed is per sample.
    """

    node_id: int
    device: Device
    config: Mapping[str, Value] = field(default_factory=dict)
    examples: int = 0


# Of two things at the same moment a device's coming or going is first: whatever is sent at that
# moment then meets the fleet as it is afterwards.
_SWITCH, _REPLY = 0, 1


@dataclass
class _Pending:
    """A message without a reply yet."""

    message: Message
    expires: float
    due: float
    lost: str | None = None


class VirtualGrid(Grid):
    """Simulates devices behind Flower's own Grid interface, on a clock of its own.

    A training message is answered after the time that its device needs for download, computation
    and upload; a device works on one at a time. Queries and evaluation cost no virtual time. The
    clock moves only inside `wait`, `pull_messages` and `send_and_receive`, to the next arrival.
    A task that gets lost (dropped, or its device went offline) is answered by Flower's error reply
    when its time to live ends. Whatever happens is decided by the seed alone.

    Parameters
    ----------
    client_app : ClientApp
        Answers the messages.
    nodes : Sequence[Node]
        The fleet.
    run_config : Mapping[str, Value]
        Flower's run config, handed to the ClientApp.
    seed : int
        Decides jitter, lost tasks and random absences.
    executor : Executor, optional
        Where the work is done; in this process if not given.
    """

    is_virtual = True
    free_evaluation = True
    keeps_messages = False

    def __init__(
        self,
        client_app: ClientApp,
        nodes: Sequence[Node],
        run_config: Mapping[str, Value] | None = None,
        seed: int = 0,
        executor: Executor | None = None,
    ) -> None:
        self._run = compat.empty_run()
        self._executor = executor or InProcess(client_app)
        self._nodes = {node.node_id: node for node in nodes}
        self._contexts = {
            node.node_id: Context(
                run_id=self._run.run_id,
                node_id=node.node_id,
                node_config=dict(node.config),
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for node in nodes
        }
        self._clock = 0.0
        self._pushed = 0
        self._pending: dict[str, _Pending] = {}
        self._arrived: dict[str, Message] = {}
        self._busy_until: dict[int, float] = {}
        # Heap of (time, kind, order, key); an entry of a message counts only while it is the
        # message's current due time, so that a loss can postpone it without a search.
        self._events: list[tuple[float, int, int, str | int]] = []
        self._order = 0
        self._task_rng: dict[int, np.random.Generator] = {}
        self._given = {node.node_id: 0 for node in nodes}
        self._switches: dict[int, Iterator[float]] = {}
        self._switched: dict[int, int] = {}
        self._online: dict[int, None] = {}
        for node in nodes:
            seeds = np.random.SeedSequence([seed, node.node_id]).spawn(2)
            self._task_rng[node.node_id] = np.random.default_rng(seeds[0])
            self._switches[node.node_id] = node.device.switches(np.random.default_rng(seeds[1]))
            self._switched[node.node_id] = 0
            if node.device.starts_online():
                self._online[node.node_id] = None
            self._schedule_switch(node.node_id)
        compat.identify_process(self._run.run_id)

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self._clock

    def wait(self, message_ids: Collection[str], until: float | None = None) -> list[Message]:
        """Move the clock to the next reply among `message_ids`, and return it.

        Returns nothing if `until` comes first, or if a device comes or goes first (the clock is
        then at that moment), or if nothing will ever happen again (the clock stays).
        """
        return self._advance(message_ids, until, stop_on_switch=True)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; each starts its way to its node at the present time."""
        message_ids = []
        for message in messages:
            message_id = f"{self._pushed:08d}"
            self._pushed += 1
            message.content = _copy(message.content)
            compat.set_message_id(message, message_id)
            self._dispatch(message_id, message)
            message_ids.append(message_id)
        return message_ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there; if none is, move the clock to the next one."""
        wanted = set(message_ids)
        ready = [self._arrived.pop(key) for key in list(self._arrived) if key in wanted]
        return ready or self._advance(wanted, None, stop_on_switch=False)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and move the clock until all are answered, or by `timeout` seconds."""
        open_ids = dict.fromkeys(self.push_messages(messages))
        deadline = None if timeout is None else self._clock + timeout
        replies: list[Message] = []
        while open_ids:
            arrived = self._advance(open_ids, deadline, stop_on_switch=False)
            if not arrived:
                break
            replies.extend(arrived)
            for reply in arrived:
                del open_ids[reply.metadata.reply_to_message_id]
        return replies

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that are online now."""
        return list(self._online)

    def set_run(self, run: Run) -> None:
        """Set the run that messages belong to."""
        self._run = run
        compat.identify_process(run.run_id)

    @property
    def run(self) -> Run:
        """The run that messages belong to."""
        return self._run

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

    def forget(self, message_ids: Iterable[str]) -> None:
        """Drop."""
        for key in message_ids:
            self._arrived.pop(key, None)

    def close(self) -> None:
        """Release the executor."""
        self._executor.close()

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides how the simulation goes on: a tree of plain values and arrays.

        Work in progress is not in it. Its messages are: it is done again, with the same result.
        """
        return {
            "clock": self._clock,
            "pushed": self._pushed,
            "order": self._order,
            "events": list(self._events),
            "pending": [
                {
                    "message": message_to_tree(pending.message),
                    "expires": pending.expires,
                    "due": pending.due,
                    "lost": pending.lost,
                }
                for pending in self._pending.values()
            ],
            "arrived": [reply_to_tree(reply) for reply in self._arrived.values()],
            "online": list(self._online),
            "nodes": {
                str(node_id): {
                    "busy-until": self._busy_until.get(node_id),
                    "rng": self._task_rng[node_id].bit_generator.state,
                    "given": self._given[node_id],
                    "switched": self._switched[node_id],
                    "state": records_to_tree(self._contexts[node_id].state),
                }
                for node_id in self._nodes
            },
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Go back to where a grid of the same fleet and seed was; for a grid that is new."""
        self._clock, self._pushed, self._order = tree["clock"], tree["pushed"], tree["order"]
        self._events = [(time, kind, order, key) for time, kind, order, key in tree["events"]]
        self._online = dict.fromkeys(tree["online"])
        for name, known in tree["nodes"].items():
            node_id = int(name)
            if known["busy-until"] is not None:
                self._busy_until[node_id] = known["busy-until"]
            self._task_rng[node_id].bit_generator.state = known["rng"]
            self._given[node_id] = known["given"]
            while self._switched[node_id] < known["switched"]:
                next(self._switches[node_id], None)
                self._switched[node_id] += 1
            self._contexts[node_id].state = records_from_tree(known["state"])
        self._arrived = {reply["id"]: reply_from_tree(reply) for reply in tree["arrived"]}
        for saved in tree["pending"]:
            message = message_from_tree(saved["message"])
            pending = _Pending(message, saved["expires"], saved["due"], saved["lost"])
            self._pending[message.metadata.message_id] = pending
            if pending.lost is None:
                context = self._contexts[message.metadata.dst_node_id]
                self._executor.submit(message, context, pending.due)
        self.keeps_messages = True

    def _dispatch(self, message_id: str, message: Message) -> None:
        """Decide when a message will be answered, and hand its work to the executor."""
        node_id = message.metadata.dst_node_id
        expires = self._clock + message.metadata.ttl
        pending = _Pending(message, expires, due=self._clock)
        self._pending[message_id] = pending
        if node_id not in self._nodes:
            pending.lost = f"there is no node {node_id}"
        elif node_id not in self._online:
            pending.lost, pending.due = "the device is offline", expires
        else:
            if message.metadata.message_type.split(".")[0] == MessageType.TRAIN:
                self._time_training(node_id, pending)
            if pending.lost is None:
                self._executor.submit(message, self._contexts[node_id], pending.due)
        self._schedule(pending.due, _REPLY, message_id)

    def _time_training(self, node_id: int, pending: _Pending) -> None:
        """Set when a training task is done, or that it gets lost."""
        node, rng, content = self._nodes[node_id], self._task_rng[node_id], pending.message.content
        number = self._given[node_id]
        self._given[node_id] += 1
        config = content.config_records.get(CONFIG, ConfigRecord())
        model_bytes = [record.count_bytes() for record in content.array_records.values()]
        duration = node.device.duration(
            examples=node.examples,
            epochs=int(config.get(LOCAL_EPOCHS, 1)),  # type: ignore[arg-type]
            bytes_down=sum(model_bytes),
            bytes_up=model_bytes[0] if model_bytes else 0,
            scale=float(config.get(COMPUTE_SCALE, 1.0)),  # type: ignore[arg-type]
            rng=rng,
            task=number,
        )
        dropped = rng.uniform() < node.device.drop
        start = max(self._clock, self._busy_until.get(node_id, 0.0))
        pending.due = self._busy_until[node_id] = start + duration
        if dropped:
            pending.lost, pending.due = "the task was lost on the way", pending.expires
        elif pending.due > pending.expires:
            pending.lost, pending.due = (
                "the task took longer than its time to live",
                pending.expires,
            )
        elif node.device.fails(number):
            pending.lost = "the task was of no use in the recorded run either"

    def _advance(
        self, message_ids: Collection[str], until: float | None, stop_on_switch: bool
    ) -> list[Message]:
        """Process events in order of time up to the first reply that is wanted."""
        for arrived in self._arrived:
            if arrived in message_ids:
                return [self._arrived.pop(arrived)]
        # Devices that come and go at random do so for ever: without this check, waiting for a
        # reply that cannot come would never end.
        hopeless = not stop_on_switch and not any(key in self._pending for key in message_ids)
        while self._events and not hopeless:
            time, kind, _, key = self._events[0]
            if until is not None and time > until:
                break
            heapq.heappop(self._events)
            if kind == _SWITCH:
                assert isinstance(key, int)
                self._clock = max(self._clock, time)
                self._switch(key)
                if stop_on_switch:
                    return []
                continue
            assert isinstance(key, str)
            entry = self._pending.get(key)
            if entry is None or entry.due != time:
                continue
            self._clock = max(self._clock, time)
            reply = self._reply(key)
            if key in message_ids:
                return [reply]
            self._arrived[key] = reply
        if until is not None and until < math.inf:
            self._clock = max(self._clock, until)
        return []

    def _reply(self, message_id: str) -> Message:
        """Produce the reply of a message whose time has come."""
        pending = self._pending.pop(message_id)
        if pending.lost is None:
            return self._executor.result(message_id)
        known = pending.message.metadata.dst_node_id in self._nodes
        code = compat.REPLY_MESSAGE_UNAVAILABLE if known else compat.NODE_UNAVAILABLE
        return compat.error_reply(pending.message, code, pending.lost)

    def _switch(self, node_id: int) -> None:
        """Let a device come online, or go offline with all that it was working on."""
        if node_id not in self._online:
            self._online[node_id] = None
        else:
            del self._online[node_id]
            self._busy_until.pop(node_id, None)
            for message_id, pending in self._pending.items():
                if pending.message.metadata.dst_node_id == node_id and pending.lost is None:
                    self._executor.cancel(message_id)
                    pending.lost, pending.due = "the device went offline", pending.expires
                    self._schedule(pending.due, _REPLY, message_id)
        self._schedule_switch(node_id)

    def _schedule_switch(self, node_id: int) -> None:
        time = next(self._switches[node_id], None)
        self._switched[node_id] += 1
        if time is not None:
            self._schedule(time, _SWITCH, node_id)

    def _schedule(self, time: float, kind: int, key: str | int) -> None:
        heapq.heappush(self._events, (time, kind, self._order, key))
        self._order += 1


def _copy(content: RecordDict) -> RecordDict:
    """Copy records, not the arrays in them, as sending does: messages may share their content.

    Without it what a client writes into its message would show in the others', and what the
    server writes later would show in work that is not done yet.
    """
    copied = RecordDict()
    for name, record in content.items():
        copied[name] = record.copy()
    return copied
