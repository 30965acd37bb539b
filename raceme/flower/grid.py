"""Base classes of Raceme's grids, and Flower's grid without waits for incomplete replies."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeGuard

from flwr.app import Error, Message, Metadata, RecordDict
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.recorddict_pb2 import StringList
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run

if TYPE_CHECKING:
    from flwr.superlink.grid.http_grid import HttpGrid

from raceme.flower.messages import MESSAGE_UNAVAILABLE, SERVER_NODE_ID, made, set_message_id
from raceme.flower.objects import ids_of


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

    def pull_messages(
        self, message_ids: Iterable[str] = (), *, reply_to_message_ids: Iterable[str] = ()
    ) -> Iterable[Message]:
        """Return replies to some messages, whose ids Flower 1.43 calls `reply_to_message_ids`."""
        return self._pull([*message_ids, *reply_to_message_ids])

    @abstractmethod
    def _pull(self, message_ids: Collection[str]) -> Iterable[Message]:
        """Return replies to some messages, given their ids."""


class GridWrapper(OwnGrid):
    """A grid on top of another one, whose run it has."""

    _grid: Grid

    def set_run(self, run: Run) -> None:
        """Set the run that messages belong to."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run that messages belong to."""
        return self._grid.run


class PatientGrid(OwnGrid, ABC):
    """A grid on whose clock it is waited for replies, one or a few after the other."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and wait until all are answered, or for `timeout` seconds."""
        open_ids = dict.fromkeys(self.push_messages(messages))
        deadline = None if timeout is None else self.now() + timeout
        replies: list[Message] = []
        while open_ids and (found := self._more(open_ids, deadline)) is not None:
            replies += found
            for reply in found:
                open_ids.pop(reply.metadata.reply_to_message_id, None)
        return replies

    @abstractmethod
    def now(self) -> float:
        """Return the time in seconds."""

    @abstractmethod
    def _more(
        self, message_ids: Collection[str], deadline: float | None
    ) -> Sequence[Message] | None:
        """Wait for more replies and return them; None if there will be none by the deadline."""


# -----------------------------------------------------------------------------
# The ServerApp's side of Flower's message exchange.
# -----------------------------------------------------------------------------


_UPLOAD_SECONDS = 60.0
"""Longest wait for the next part of a reply that was announced."""
_POLL_SECONDS = 0.2
_SYSTEM_MESSAGE = "system"
"""Type of messages of no node (flwr.supercore.constant: SYSTEM_MESSAGE_TYPE)."""
_AT_ONCE = 8
"""Parts that are fetched at the same time."""


@dataclass
class _Upload:
    """A reply that was announced, and as much of it as has arrived.

    Attributes
    ----------
    message_id, reply_to : str
        Its own id, and that of the message that it answers.
    sender : int
        The node that sends it; the SuperLink has checked that.
    missing : deque[str]
        Ids of the parts that have not arrived yet, in the order in which they are looked for.
    contents : dict[str, bytes]
        Parts that have arrived, by their ids.
    progressed_at : float
        When the last of them arrived, or when it was announced.
    """

    message_id: str
    reply_to: str
    sender: int
    missing: deque[str]
    progressed_at: float
    contents: dict[str, bytes] = field(default_factory=dict)


class PromptGrid(GridWrapper, PatientGrid):
    """Flower's grid, on which no reply waits for the rest of another.

    A reply is announced before its arrays have arrived. Flower's grid, which finds them missing,
    waits for them, and all other replies with it: for three minutes if the sender has died. Here a
    reply that is not complete is set aside, and looked at again whenever replies are asked for.

    What a device has sent is not trusted either: a reply that cannot be read, or that says that it
    comes from another node or answers another message than was announced, is an error reply.

    Parameters
    ----------
    grid : HttpGrid
        Flower's grid, whose connection to the SuperLink is used.
    clock : Callable
        Returns the time in seconds; tests pass their own.
    """

    _grid: HttpGrid

    def __init__(self, grid: HttpGrid, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._grid, self._clock = grid, clock
        self._uploads: dict[str, _Upload] = {}
        self._pool = ThreadPoolExecutor(_AT_ONCE)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are online."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, and return their ids."""
        return self._grid.push_messages(messages)

    def _pull(self, message_ids: Collection[str]) -> list[Message]:
        """Return the replies to some messages that are complete, without waiting for others."""
        wanted = set(message_ids)
        # What was announced once the SuperLink does not know any more.
        self._take_announced(sorted(wanted - self._uploads.keys()))
        return list(self._complete(wanted))

    def forget(self, message_ids: Iterable[str]) -> None:
        """Give up on the rest of replies to some messages."""
        for message_id in message_ids:
            self._uploads.pop(message_id, None)

    def now(self) -> float:
        """Return the time of a clock that never jumps."""
        return self._clock()

    def _more(
        self, message_ids: Collection[str], deadline: float | None
    ) -> Sequence[Message] | None:
        if deadline is not None and self._clock() >= deadline:
            return None
        found = self._pull(message_ids)
        if not found:
            time.sleep(_POLL_SECONDS)
        return found

    def _take_announced(self, message_ids: list[str]) -> None:
        """Ask which replies were announced."""
        if not message_ids:
            return
        answer = self._grid._runtime_client.PullMessages(_request_for(message_ids))
        now = self._clock()
        for head, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
            stated = head.metadata
            self._uploads[stated.reply_to_message_id] = _Upload(
                message_id=stated.message_id,
                reply_to=stated.reply_to_message_id,
                sender=stated.src_node_id,
                missing=deque(ids_of(tree)),
                progressed_at=now,
            )

    def _complete(self, wanted: set[str]) -> Iterator[Message]:
        """Yield those of the wanted replies that are complete, or will never be."""
        for upload in [upload for key, upload in self._uploads.items() if key in wanted]:
            reason = self._fetch(upload)
            if upload.missing and not reason:
                continue
            del self._uploads[upload.reply_to]
            if not reason:
                request = ConfirmMessageReceivedRequest(
                    node=self._grid.node, run_id=self._run_id, message_object_id=upload.message_id
                )
                self._grid._runtime_client.ConfirmMessageReceived(request)
            yield self._unavailable(upload, reason) if reason else self._read(upload)

    def _fetch(self, upload: _Upload) -> str:
        """Fetch what has arrived of a reply; return why the rest of it never will, or nothing."""
        while upload.missing:
            batch = [upload.missing.popleft() for _ in range(min(_AT_ONCE, len(upload.missing)))]
            found = list(self._pool.map(self._part, batch))
            for part, content in zip(batch, found, strict=True):
                if content is None:
                    # Looked at again after all others.
                    upload.missing.append(part)
                elif content:
                    upload.contents[part] = content
                    upload.progressed_at = self._clock()
                else:
                    return "The rest of the reply is lost: the SuperLink has it no more"
            if all(content is None for content in found):
                break
        if upload.missing and self._clock() >= upload.progressed_at + _UPLOAD_SECONDS:
            return f"The rest of the reply has not come for {_UPLOAD_SECONDS:g} s"
        return ""

    def _part(self, part: str) -> bytes | None:
        """Return a part of a reply: None if it has not arrived yet, nothing if it never will."""
        request = PullObjectRequest(node=self._grid.node, run_id=self._run_id, object_id=part)
        answer = self._grid._runtime_client.PullObject(request)
        if not answer.object_found:
            return b""
        return bytes(answer.object_content) if answer.object_available else None

    def _read(self, upload: _Upload) -> Message:
        """Return a reply whose parts have all arrived."""
        reason = "The reply says that it is another one than was announced"
        try:
            message = inflate_object_from_contents(upload.message_id, upload.contents)
            if not isinstance(message, Message):
                raise TypeError(f"it is a {type(message).__name__}")
            stated = message.metadata
            if (stated.src_node_id, stated.reply_to_message_id) == (upload.sender, upload.reply_to):
                set_message_id(message, upload.message_id)
                return message
        # A device may send anything in place of a part: what that raises is not known beforehand.
        except Exception as error:
            reason = f"The reply cannot be read: {type(error).__name__}: {error}"
        return self._unavailable(upload, reason)

    def _unavailable(self, upload: _Upload, reason: str) -> Message:
        """Return the error reply that stands for a reply that will never be seen."""
        metadata = Metadata(
            run_id=self._run_id,
            message_id="",
            src_node_id=upload.sender,
            dst_node_id=SERVER_NODE_ID,
            reply_to_message_id=upload.reply_to,
            group_id="",
            created_at=time.time(),
            ttl=0,
            message_type=_SYSTEM_MESSAGE,
        )
        return made(metadata=metadata, error=Error(MESSAGE_UNAVAILABLE, reason))

    @property
    def _run_id(self) -> int:
        return self._grid.run.run_id


def _request_for(message_ids: list[str]) -> PullAppMessagesRequest:
    """Ask for the replies to some messages, as the installed release of Flower does."""
    if "message_ids" in PullAppMessagesRequest.DESCRIPTOR.fields_by_name:
        return PullAppMessagesRequest(message_ids=message_ids)
    # From 1.43 on.
    filters = {"reply_to_message_ids": StringList(vals=message_ids)}
    return PullAppMessagesRequest(**filters)


def prompt(grid: Grid) -> Grid:
    """Return a grid on which no reply waits for the rest of another one: itself, if it is such."""
    return PromptGrid(grid) if _is_http(grid) else grid


def has_devices(grid: Grid) -> bool:
    """Return whether a grid's nodes are processes that connect to a SuperLink."""
    return isinstance(grid, PromptGrid) or _is_http(grid)


def _is_http(grid: Grid) -> TypeGuard[HttpGrid]:
    """Return whether a grid is Flower's connection to a SuperLink.

    Its module imports a database and a web framework, half a second; where it was not imported yet
    there is no such grid.
    """
    module = sys.modules.get("flwr.superlink.grid.http_grid")
    return module is not None and isinstance(grid, module.HttpGrid)


def parent_pid(arguments: Sequence[str] | None = None) -> int | None:
    """Return the process that Flower's own one for server apps is told to look at; None elsewhere.

    Parameters
    ----------
    arguments : Sequence[str], optional
        A command line; that of this process if not given.
    """
    words = list(sys.argv if arguments is None else arguments)
    if "--parent-pid" not in words[:-1] or "serverapp" not in words[0]:
        return None
    return int(words[words.index("--parent-pid") + 1])
