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
        """Return replies to some messages, in Flower 1.43 given as `reply_to_message_ids`."""
        return self._pull([*message_ids, *reply_to_message_ids])

    @abstractmethod
    def _pull(self, message_ids: Collection[str]) -> Iterable[Message]:
        """Return replies to some messages, given their ids."""


class GridWrapper(OwnGrid):
    """A grid on top of another one, with the same run."""

    _grid: Grid

    def set_run(self, run: Run) -> None:
        """Set the run that messages belong to."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run that messages belong to."""
        return self._grid.run


class PatientGrid(OwnGrid, ABC):
    """A grid with a clock, which waits for one or a few replies at a time."""

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
        """Wait for further replies and return them; None if none will come before the deadline."""


# -----------------------------------------------------------------------------
# The ServerApp's side of Flower's message exchange.
# -----------------------------------------------------------------------------


_UPLOAD_SECONDS = 60.0
"""Longest wait for the next part of a reply that was announced."""
_POLL_SECONDS = 0.2
_SYSTEM_MESSAGE = "system"
"""Type of messages that belong to no node (flwr.supercore.constant: SYSTEM_MESSAGE_TYPE)."""
_AT_ONCE = 8
"""Number of parts that are fetched at the same time."""


@dataclass
class _Upload:
    """An announced reply, and the parts that have arrived.

    Attributes
    ----------
    message_id, reply_to : str
        Ids of the reply, and of the answered message.
    sender : int
        The sending node, as checked by the SuperLink.
    missing : deque[str]
        Ids of the missing parts, in the order in which they are requested.
    contents : dict[str, bytes]
        Arrived parts, by id.
    progressed_at : float
        Time at which the last part arrived, or of the announcement.
    """

    message_id: str
    reply_to: str
    sender: int
    missing: deque[str]
    progressed_at: float
    contents: dict[str, bytes] = field(default_factory=dict)


class PromptGrid(GridWrapper, PatientGrid):
    """Flower's grid without waits for incomplete replies.

    A reply is announced before its arrays have arrived. Flower's grid waits for missing arrays, and
    delays all other replies: for three minutes if the sender has died. Here an incomplete reply is
    set aside, and checked again at each request for replies.

    Content from devices is not trusted, either: a reply that cannot be read, or that states another
    sender or another answered message than announced, becomes an error reply.

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
        """Return the complete replies to some messages, without waiting for others."""
        wanted = set(message_ids)
        # The SuperLink forgets announced replies, so messages with one are not asked for again.
        self._take_announced(sorted(wanted - self._uploads.keys()))
        return list(self._complete(wanted))

    def forget(self, message_ids: Iterable[str]) -> None:
        """Give up on incomplete replies to some messages."""
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
        """Fetch the announcements of replies."""
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
        """Yield the complete ones of wanted replies, and errors for those that never will be."""
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
        """Fetch the arrived parts of a reply; return why the rest is lost, or an empty text."""
        while upload.missing:
            batch = [upload.missing.popleft() for _ in range(min(_AT_ONCE, len(upload.missing)))]
            found = list(self._pool.map(self._part, batch))
            for part, content in zip(batch, found, strict=True):
                if content is None:
                    # This part is requested again after all others.
                    upload.missing.append(part)
                elif content:
                    upload.contents[part] = content
                    upload.progressed_at = self._clock()
                else:
                    return "The rest of the reply is lost: the SuperLink does not have it any more"
            if all(content is None for content in found):
                break
        if upload.missing and self._clock() >= upload.progressed_at + _UPLOAD_SECONDS:
            return f"The rest of the reply has not arrived within {_UPLOAD_SECONDS:g} s"
        return ""

    def _part(self, part: str) -> bytes | None:
        """Return a part of a reply: None if it has not arrived yet, empty if it never will."""
        request = PullObjectRequest(node=self._grid.node, run_id=self._run_id, object_id=part)
        answer = self._grid._runtime_client.PullObject(request)
        if not answer.object_found:
            return b""
        return bytes(answer.object_content) if answer.object_available else None

    def _read(self, upload: _Upload) -> Message:
        """Decode a reply whose parts have all arrived."""
        reason = "The reply differs from its announcement"
        try:
            message = inflate_object_from_contents(upload.message_id, upload.contents)
            if not isinstance(message, Message):
                raise TypeError(f"it is a {type(message).__name__}")
            stated = message.metadata
            if (stated.src_node_id, stated.reply_to_message_id) == (upload.sender, upload.reply_to):
                set_message_id(message, upload.message_id)
                return message
        # A device may send any bytes as a part, which may raise any exception.
        except Exception as error:
            reason = f"The reply cannot be read: {type(error).__name__}: {error}"
        return self._unavailable(upload, reason)

    def _unavailable(self, upload: _Upload, reason: str) -> Message:
        """Return an error reply in place of a reply that will never be complete."""
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
    """Return the request for replies to some messages, as in the installed Flower release."""
    if "message_ids" in PullAppMessagesRequest.DESCRIPTOR.fields_by_name:
        return PullAppMessagesRequest(message_ids=message_ids)
    # From 1.43 on.
    filters = {"reply_to_message_ids": StringList(vals=message_ids)}
    return PullAppMessagesRequest(**filters)


def prompt(grid: Grid) -> Grid:
    """Return a grid without waits for incomplete replies: the grid itself, if it has none."""
    return PromptGrid(grid) if _is_http(grid) else grid


def has_devices(grid: Grid) -> bool:
    """Return whether a grid's nodes are processes that connect to a SuperLink."""
    return isinstance(grid, PromptGrid) or _is_http(grid)


def _is_http(grid: Grid) -> TypeGuard[HttpGrid]:
    """Return whether a grid is Flower's connection to a SuperLink.

    Its module imports a database and a web framework, which takes half a second. If it has not been
    imported, there is no such grid.
    """
    module = sys.modules.get("flwr.superlink.grid.http_grid")
    return module is not None and isinstance(grid, module.HttpGrid)


def parent_pid(arguments: Sequence[str] | None = None) -> int | None:
    """Return the parent process that Flower's process for server apps observes; None elsewhere.

    Parameters
    ----------
    arguments : Sequence[str], optional
        A command line; that of this process if not given.
    """
    words = list(sys.argv if arguments is None else arguments)
    if "--parent-pid" not in words[:-1] or "serverapp" not in words[0]:
        return None
    return int(words[words.index("--parent-pid") + 1])
