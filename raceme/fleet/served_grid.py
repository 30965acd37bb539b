"""A Flower Grid in the process of the link state that serves its clients."""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from flwr.app import Message

from raceme.flower.grid import PatientGrid
from raceme.flower.link_state import LinkState
from raceme.flower.messages import Run, join, split

# -----------------------------------------------------------------------------
# The journal: replies since the last checkpoint, written before they are acknowledged.
#
# An entry is a reply as byte strings. An entry truncated by a power failure, and all after it, are
# ignored.
# -----------------------------------------------------------------------------


log = logging.getLogger("raceme.serve")

_LENGTH = struct.Struct(">Q")
_DIGEST_BYTES = 32


class Journal:
    """A journal with one file per checkpoint, of the same number.

    Parameters
    ----------
    folder : Path
        Folder of the files, created with the first.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self._failed = False

    def begin(self) -> int:
        """Begin a new file; return its number."""
        number = max(self._numbers(), default=0) + 1
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        # Updates are as private as the models in the checkpoints beside them.
        descriptor = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._file = os.fdopen(descriptor, "wb")
        return number

    def drop(self, before: int) -> None:
        """Remove the files before a number, whose checkpoints are gone."""
        for number in self._numbers():
            if number < before:
                self._path(number).unlink(missing_ok=True)

    def append(self, parts: Sequence[bytes]) -> None:
        """Write an entry; on failure the reply is used but would not survive a crash."""
        if self._file is None:
            return
        try:
            body = join(parts)
            digest = hashlib.sha256(body).digest()
            self._file.write(_LENGTH.pack(len(body)) + body + digest)
            self._file.flush()
        except OSError as error:
            if not self._failed:
                log.warning("Replies cannot be kept for a restart: %s", error.strerror)
            self._failed = True
        else:
            self._failed = False

    def read(self, first: int) -> Iterator[list[bytes]]:
        """Return the entries of a file and its successors, in order."""
        for number in self._numbers():
            if number >= first:
                with self._path(number).open("rb") as file:
                    yield from _entries(file)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _numbers(self) -> list[int]:
        stems = [path.stem.removeprefix("replies-") for path in self._folder.glob("replies-*.bin")]
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def _path(self, number: int) -> Path:
        return self._folder / f"replies-{number:08d}.bin"


def _entries(file: BinaryIO) -> Iterator[list[bytes]]:
    while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
        (length,) = _LENGTH.unpack(head)
        body = file.read(length)
        if file.read(_DIGEST_BYTES) != hashlib.sha256(body).digest():
            return
        yield split(body)


# -----------------------------------------------------------------------------
# A Flower Grid in the process of the link state that serves its clients.
# -----------------------------------------------------------------------------


_SLICE_SECONDS = 0.25
"""Time until a signal is noticed while no reply arrives."""
_FLEET_SECONDS = 0.2
"""Minimum time between two listings of the fleet."""
_MOST = 8
"""Replies returned together. New work is sent once all of them are processed: without this bound, a
reply that just missed them would wait for hundreds of others."""
_KEPT_REPLIES = 4
"""Journal size per node between two checkpoints, in replies of the largest size."""
_KIND = "served"


class ServedGrid(PatientGrid):
    """Exchanges messages through the link state; a reply ends the wait for it.

    Its clock is the wall clock, which starts when enough clients are online. Checkpoints include
    its open messages.

    Parameters
    ----------
    state : LinkState
        State behind the Fleet API.
    journal : Path
        Folder for the replies since the last checkpoint.
    listen : Callable
        Starts the server; called when everything is ready.
    clients_min : int
        Number of nodes to wait for at the start.
    stopping : Callable
        Returns a true value once the run is to end.
    clock : Callable
        Returns the time in seconds; tests pass their own.

    Attributes
    ----------
    turns : list[Callable]
        Called in the strategy's thread whenever it looks for replies; returns whether it has done
        something that the strategy should look at.
    """

    is_virtual = False
    free_evaluation = False
    keeps_messages = False
    looked_at = 0.0
    """Time at which the strategy last looked for replies, on the monotonic clock."""

    def __init__(
        self,
        state: LinkState,
        journal: Path,
        listen: Callable[[], None],
        *,
        clients_min: int = 1,
        stopping: Callable[[], object] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state, self._listen, self._stopping = state, listen, stopping
        self._journal = Journal(journal)
        self._clients_min, self._clock = clients_min, clock
        self._listens = self._is_open = False
        self._start = 0.0
        self._news = threading.Condition()
        self._has_news = False
        self._nodes: list[int] = []
        self._online: list[int] = []
        self._seen_at = float("-inf")
        # Messages in the last checkpoint: only their replies are kept.
        self._saved: frozenset[str] = frozenset()
        self._files: list[int] = []
        # Bytes per node in the current file.
        self._kept: Counter[int] = Counter()
        self.turns: list[Callable[[], bool]] = []
        state.on_news = self.tell
        state.on_reply = self._keep

    # A clock and the wait for replies.

    def now(self) -> float:
        """Return the seconds since enough clients were online, earlier processes included."""
        return self._clock() - self._start if self._is_open else self._start

    def wait(self, message_ids: Collection[str], until: float | None = None) -> list[Message]:
        """Wait until replies have come, the fleet has changed, or the deadline has passed.

        Of many replies the earliest are returned, the others at the next call.
        """
        self._begin()
        wanted = frozenset(message_ids)
        while True:
            self.looked_at = self._clock()
            with self._news:
                self._has_news = False
            acted = True in [turn() for turn in self.turns]
            replies = self._state.take(wanted, _MOST)
            if replies or acted or self._has_fleet_changed() or self._stopping():
                return replies
            left = _SLICE_SECONDS
            if until is not None and self._is_open:
                left = min(left, until - self.now())
                if left <= 0:
                    return []
            with self._news:
                if not self._has_news:
                    self._news.wait(left)

    def _begin(self) -> None:
        """Start to answer calls, once."""
        if not self._listens:
            self._listens = True
            self._listen()

    def forget(self, message_ids: Iterable[str]) -> None:
        """Drop messages; those not fetched are no longer delivered."""
        self._state.forget(message_ids)

    def _has_fleet_changed(self) -> bool:
        """Return whether nodes have joined or left since the last query."""
        if not self._look():
            return False
        if not self._is_open and len(self._online) >= self._clients_min:
            self._open()
        return self._is_open and (self._online != self._nodes or bool(self._state.renewed))

    def _look(self) -> bool:
        """List the online nodes unless just done; return whether it was."""
        now = self._clock()
        if now < self._seen_at + _FLEET_SECONDS:
            return False
        # For thousands of nodes it takes longer than an update.
        self._seen_at, self._online = now, self._state.online()
        return True

    def _open(self) -> None:
        self._start = self._clock() - self._start
        self._is_open = True

    def tell(self) -> None:
        """End the wait: a reply or a command has come, or the fleet has changed."""
        with self._news:
            self._has_news = True
            self._news.notify_all()

    def _keep(self, message_id: str, parcel: Callable[[], list[bytes]]) -> None:
        """Journal a reply that a restart from the last checkpoint would wait for.

        Replies beyond a node's share are requested again after a restart.
        """
        if message_id not in self._saved:
            return
        node = self._state.message_ins_store[message_id].metadata.dst_node_id
        parts = parcel()
        size = sum(map(len, parts))
        if self._kept[node] + size <= _KEPT_REPLIES * self._state.largest:
            self._kept[node] += size
            self._journal.append(parts)

    # Flower's interface.

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; the ids of those that could not be sent are left out."""
        sent = [self._state.push(message) for message in messages]
        return [message_id for message_id in sent if message_id is not None]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies present."""
        return self._state.take(frozenset(message_ids))

    def _more(self, message_ids: Collection[str], deadline: float | None) -> list[Message] | None:
        if self._stopping() or (deadline is not None and self.now() >= deadline):
            return None
        return self.wait(message_ids, deadline)

    def get_node_ids(self) -> Iterable[int]:
        """Return the online nodes once there are enough."""
        self._look()
        # A node that has begun anew is missed once, so that the strategy takes it in again.
        renewed, self._state.renewed = self._state.renewed, set()
        self._nodes = (
            [node for node in self._online if node not in renewed] if self._is_open else []
        )
        return list(self._nodes)

    def get_nodes(self) -> Iterable[Any]:
        """Return the online nodes with their public keys."""
        return self._state.get_node_info(node_ids=self._state.online())

    def key_changes(self) -> list[tuple[str, str]]:
        """Return the devices whose registered keys have changed since the last call, and how."""
        changes = self._state.key_changes
        return [changes.popleft() for _ in range(len(changes))]

    def set_run(self, run: Run) -> None:
        """Do nothing: the link state has one run."""

    @property
    def run(self) -> Run:
        """The run that messages belong to."""
        return self._state.get_run_info(run_ids=[self._state.run_id])[0]

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return nodes, open messages, replies not fetched so far, and the time."""
        with self._state.lock:
            # The state includes earlier replies; later ones go to the new file. Two checkpoints are
            # kept, and until this one is written the previous one is the only valid one.
            number = self._journal.begin()
            self._files = [*self._files[-1:], number]
            self._journal.drop(self._files[0])
            self._kept.clear()
            tree = self._state.state_dict()
            self._saved = frozenset(self._state.message_ins_store)
        return {
            "kind": _KIND,
            "time": self.now(),
            "open": self._is_open,
            "journal": number,
            "state": tree,
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, and the journalled replies."""
        if tree.get("kind") != _KIND:
            raise ValueError("it is of a run on virtual time: `raceme run --resume` resumes it")
        self._state.load_state_dict(tree["state"])
        for parcel in self._journal.read(tree["journal"]):
            self._state.receive(parcel)
        self._start = float(tree["time"])
        if tree["open"]:
            self._open()
        self._nodes = self._online = self._state.online()
        self._saved = frozenset(self._state.message_ins_store)
        # New replies belong to the same checkpoint until the next.
        self._journal.begin()
        self._files = [tree["journal"]]
        self.keeps_messages = True

    def close(self) -> None:
        """Close the files."""
        self._journal.close()
