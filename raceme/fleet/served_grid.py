"""The grid of `raceme serve`, in one process with the link state that serves devices."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from safetensors import SafetensorError

from raceme.core.clients import Fleet
from raceme.core.clusters import blended
from raceme.core.errors import UserError, about, one_line, plural
from raceme.core.evaluation import read_scores
from raceme.core.events import (
    ACCURACY,
    ClientJoined,
    ClientLeft,
    ClustersChanged,
    Evaluated,
    EventHandler,
    VersionDecided,
)
from raceme.core.messages import (
    ARRAYS,
    CONFIG,
    KIND,
    STEP,
    TEST_STEPS,
    TESTED_MODELS,
    TESTED_STEPS,
    USE,
    USED_CLUSTER,
    USED_RUN,
    USED_VERSION,
    USES,
    InvalidReplyError,
    candidate,
    error_line,
)
from raceme.core.strategy import Method
from raceme.flower.grid import PatientGrid
from raceme.flower.link_state import FleetObserver, LinkState, saved_message
from raceme.flower.messages import Run, join, split
from raceme.records.versions import Pair, Stage, Version, VersionStore, is_no_worse

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
        # Readable by this user only, as updates are as private as the models in checkpoints.
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
# A Flower grid in the same process as the link state, which serves devices.
# -----------------------------------------------------------------------------


_SLICE_SECONDS = 0.25
"""Time until a signal is noticed while no reply arrives."""
_WAIT_SECONDS = 2.0
"""Longest time between two checks of the run's limits, checkpoints and files."""
_FLEET_SECONDS = 0.2
"""Minimum time between two listings of the fleet."""
_MOST = 8
"""Replies returned together. New work is sent once all of them are processed: without this bound, a
reply that just missed them would wait for hundreds of others."""
_KEPT_REPLIES = 4
"""Journal size per node between two checkpoints, in replies of the largest size."""
_KIND = "served"


class ServedGrid(PatientGrid, FleetObserver):
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
        Returns a true value once the run should end.

    Attributes
    ----------
    turns : list[Callable]
        Called in the strategy's thread whenever it looks for replies; each returns whether the
        strategy should check the fleet.
    rollouts : Rollouts or None
        Brings versions of models into use, if any are stored.
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
    ) -> None:
        self._state, self._listen, self._stopping = state, listen, stopping
        self._journal = Journal(journal)
        self._clients_min = clients_min
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
        self.rollouts: Rollouts | None = None
        state.observers.append(self)

    # A clock and the wait for replies.

    def now(self) -> float:
        """Return the seconds since enough clients were online, earlier processes included."""
        return time.monotonic() - self._start if self._is_open else self._start

    def wait(self, message_ids: Collection[str], until: float | None = None) -> list[Message]:
        """Wait until replies have come, the fleet has changed, or the deadline has passed.

        If there are many replies, the earliest are returned, and the others by the next call. After
        some seconds the result is empty, so that the run can check other reasons to end, such as a
        full disk.
        """
        self._begin()
        latest = time.monotonic() + _WAIT_SECONDS
        wanted = frozenset(message_ids)
        while True:
            self.looked_at = time.monotonic()
            with self._news:
                self._has_news = False
            acted = True in [turn() for turn in self.turns]
            if self.rollouts is None:
                replies = self._state.take(wanted, _MOST)
            else:
                self.rollouts.turn()
                # Without open messages of rollouts, those of the method are not copied.
                open_too = self.rollouts.open.keys()
                taken = self._state.take(wanted | open_too if open_too else wanted, _MOST)
                replies = [reply for reply in taken if not self.rollouts.take(reply)]
            if replies or acted or self._has_fleet_changed() or self._stopping():
                return replies
            left = min(_SLICE_SECONDS, latest - time.monotonic())
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
        if not self._list_nodes() or not self._is_open:
            return False
        return self._online != self._nodes or bool(self._state.renewed)

    def _list_nodes(self) -> bool:
        """List the online nodes unless that was just done; return whether they were listed."""
        now = time.monotonic()
        if now < self._seen_at + _FLEET_SECONDS:
            return False
        # For thousands of nodes a listing takes longer than an update.
        self._seen_at, self._online = now, self._state.online()
        if not self._is_open and len(self._online) >= self._clients_min:
            self._open()
        return True

    def _open(self) -> None:
        self._start = time.monotonic() - self._start
        self._is_open = True

    def wake(self) -> None:
        """End the wait for replies, after a reply, a command or a change of the fleet."""
        with self._news:
            self._has_news = True
            self._news.notify_all()

    def on_news(self) -> None:
        """End the wait for replies."""
        self.wake()

    def on_reply(self, message_id: str, encoded: Callable[[], list[bytes]]) -> None:
        """Write a reply to the journal if a restart from the last checkpoint would wait for it.

        Replies beyond a node's share are requested again after a restart.
        """
        if message_id not in self._saved:
            return
        node = self._state.heads[message_id].metadata.dst_node_id
        parts = encoded()
        size = sum(map(len, parts))
        if self._kept[node] + size <= _KEPT_REPLIES * self._state.largest:
            self._kept[node] += size
            self._journal.append(parts)

    # Flower's interface.

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; the ids of those that could not be sent are left out."""
        sent = [self._state.push(message) for message in messages]
        return [message_id for message_id in sent if message_id is not None]

    def _pull(self, message_ids: Collection[str]) -> Iterable[Message]:
        """Return the replies present."""
        return self._state.take(frozenset(message_ids))

    def _more(self, message_ids: Collection[str], deadline: float | None) -> list[Message] | None:
        if self._stopping() or (deadline is not None and self.now() >= deadline):
            return None
        return self.wait(message_ids, deadline)

    def get_node_ids(self) -> Iterable[int]:
        """Return the online nodes once there are enough."""
        self._list_nodes()
        # A node that started again is left out once, so that the strategy greets it again.
        renewed, self._state.renewed = self._state.renewed, set()
        self._nodes = (
            [node for node in self._online if node not in renewed] if self._is_open else []
        )
        return list(self._nodes)

    def get_nodes(self) -> Iterable[Any]:
        """Return the online nodes with their public keys."""
        return self._state.online_nodes()

    def key_changes(self) -> list[tuple[str, str]]:
        """Return the devices whose registered keys changed since the last call, with the change."""
        changes = self._state.key_changes
        return [changes.popleft() for _ in range(len(changes))]

    def set_run(self, run: Run) -> None:
        """Do nothing: the link state has one run."""

    @property
    def run(self) -> Run:
        """The run that messages belong to."""
        return self._state.run

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
            self._saved = frozenset(self._state.heads)
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
        self._saved = frozenset(self._state.heads)
        # New replies belong to the same checkpoint until the next.
        self._journal.begin()
        self._files = [tree["journal"]]
        self.keeps_messages = True

    def close(self) -> None:
        """Close the files."""
        self._journal.close()


def saved_messages(tree: Mapping[str, Any]) -> list[Message]:
    """Return the open messages with their content in the saved state of a grid.

    Raises
    ------
    UserError
        It is no such state.
    """
    try:
        if tree.get("kind") != _KIND:
            raise ValueError("it is of a run on virtual time: `raceme run --resume` resumes it")
        return [message for each in tree["state"]["messages"] if (message := saved_message(each))]
    except Exception as error:
        raise UserError(
            f"The checkpoint's open messages cannot be read: {one_line(error)}."
        ) from None


# -----------------------------------------------------------------------------
# Rollouts: which version of its cluster's model each device uses.
#
# After an evaluation the present models become new versions. Some devices of the cluster compare a
# new version with the one in use (trial) and then use it (canary); finally all devices use it. The
# messages are independent of the method's.
# -----------------------------------------------------------------------------


_MESSAGE_SECONDS = 600.0
"""Longest wait for the answer of a device, which may be training."""
_RETRY_SECONDS = 60.0
"""Pause after a failed request to a device."""
_LOOK_SECONDS = 1.0
_PROBE, _TRY, _USE = "probe", "try", "use"


@dataclass
class _Device:
    """State of a device on its present node.

    Attributes
    ----------
    node : int
        Its node.
    uses : bool or None
        Whether an application uses its model; None before the device has answered.
    has : tuple[int, int] or None
        Cluster and number of the version on the device.
    asked : tuple[str, Version or None]
        Kind and version of the open request.
    message : str
        Id of the open message; empty if there is none.
    until : float
        Time at which the request is given up, or the device is asked again.
    failures : int
        Number of consecutive versions that it could not use.
    """

    node: int
    uses: bool | None = None
    has: tuple[int, int] | None = None
    asked: tuple[str, Version | None] = (_PROBE, None)
    message: str = ""
    until: float = 0.0
    failures: int = 0

    def is_unknown(self, now: float) -> bool:
        """Return whether the device will soon answer whether an application uses its model."""
        asked_at = self.until - _MESSAGE_SECONDS
        return self.uses is None and (not self.message or now < asked_at + _RETRY_SECONDS)


class Rollouts(EventHandler):
    """Keeps versions of the clusters' models, and brings them into use.

    Parameters
    ----------
    method : Method
        The method whose models are served.
    state : LinkState
        Sends messages to devices.
    store : VersionStore
        The stored versions, with their stages.
    margin : float
        How much worse a new version may be than the one in use; see `is_no_worse`.
    canary : float
        Share of a cluster's devices that try a new version; at least one device.
    pause : float
        Least seconds between two new versions.

    Attributes
    ----------
    outcomes : Counter
        Numbers of versions that came into use, or were held, since the process began.
    open : dict[str, str]
        Device of each open message.
    """

    def __init__(
        self,
        method: Method,
        state: LinkState,
        store: VersionStore,
        *,
        margin: float,
        canary: float,
        pause: float = 0.0,
    ) -> None:
        self._method, self._state, self.store = method, state, store
        self._margin, self._canary = margin, canary
        self._pause, self._proposed_at = pause, -math.inf
        self.outcomes: Counter[Stage] = Counter()
        self._devices: dict[str, _Device] = {}
        self.open: dict[str, str] = {}
        # Devices that try each new version, and their scores.
        self._testers: dict[int, dict[str, Pair | None]] = {}
        self._records: dict[tuple[int, int], ArrayRecord] = {}
        self._measure = ACCURACY
        self._is_due, self._has_news, self._looked_at = False, True, -math.inf
        self._unsaved, self._warned = False, False

    # Events of the run, in the method's thread.

    def on_evaluated(self, event: Evaluated) -> None:
        """Propose the present models as new versions in the next turn."""
        self._is_due, self._measure = True, event.measure

    def on_client_joined(self, event: ClientJoined) -> None:
        """Ask a device again for its version."""
        self._devices.pop(event.client, None)
        self._has_news = True

    def on_client_left(self, _event: ClientLeft) -> None:
        """Stop waiting for a device."""
        self._has_news = True

    def on_clusters_changed(self, _event: ClustersChanged) -> Any:
        """Update the versions that devices use after a change of clusters."""
        self._has_news = True

    def turn(self) -> None:
        """Decide on versions, and send due messages."""
        now = time.monotonic()
        if self._is_due and now >= self._proposed_at + self._pause:
            self._is_due = False
            self._propose(now)
            self._has_news = True
        if not self._has_news and now < self._looked_at + _LOOK_SECONDS:
            return
        self._has_news, self._looked_at = False, now
        self._update_devices(now)
        for cluster in self.store.clusters:
            if version := self.store.new(cluster):
                self._decide(version)
        if self._unsaved:
            self._save()
        for client, device in self._devices.items():
            if not device.message and now >= device.until:
                self._ask(client, device, now)

    def _update_devices(self, now: float) -> None:
        """Update the devices: those that joined, left, or do not answer."""
        present = {client.client_id: client.node_id for client in self._fleet.online()}
        for name, device in list(self._devices.items()):
            is_gone = present.get(name) != device.node
            if is_gone or (device.message and now >= device.until):
                self.open.pop(device.message, None)
                self._state.forget([device.message] if device.message else [])
                device.message = ""
            if is_gone:
                del self._devices[name]
        for name, node in present.items():
            if node is not None and name not in self._devices:
                self._devices[name] = _Device(node)

    @property
    def _fleet(self) -> Fleet:
        return self._method.progress.fleet

    # New versions.

    def _propose(self, now: float) -> None:
        """Store the present models as new versions, if the last version is decided."""
        method, spec, store = self._method, self._method.spec, self.store
        store.of_errors = self._measure.is_error
        store.keep_only([*method.models, *self._inherited()])
        online = [client.client_id for client in self._fleet.online()]
        served = method.served
        for cluster, trained in list(method.models.items()):
            changes, former = trained.version, store.of(cluster)
            if store.new(cluster) or (former and former[-1].changes == changes):
                continue
            members = [name for name in online if method.clusters.main(name) == cluster]
            if not members:
                continue
            own = {
                name: spec.views(blended(served, method.placement(name)))
                for name in members
                if len(method.placement(name)) > 1
            }
            try:
                store.add(cluster, changes, spec.views(served[cluster].vector), own)
            except OSError as error:
                self._warn(error)
                return
            self._warned, self._proposed_at = False, now

    def _inherited(self) -> list[int]:
        """Return removed clusters whose versions their successors still use."""
        clusters = self._method.clusters
        return [
            gone
            for gone in self.store.clusters
            if gone not in clusters.models
            and any(self.store.in_use(heir) is None for heir in clusters.continuations(gone))
        ]

    def current(self, cluster: int) -> Version | None:
        """Return the version that a cluster uses: its own, or that of its predecessor."""
        if found := self.store.in_use(cluster):
            return found
        for gone in self.store.clusters:
            if gone != cluster and cluster in self._method.clusters.continuations(gone):
                return self.store.in_use(gone)
        return None

    def _choose(self, version: Version) -> dict[str, Pair | None]:
        """Return the devices that try a version, preferring those with an application."""
        main = self._method.clusters.main
        members = [name for name in self._devices if main(name) == version.cluster]

        def order(name: str) -> tuple[bool, int]:
            return not self._devices[name].uses, crc32(f"{version.number} {name}".encode())

        count = math.ceil(self._canary * len(members))
        return dict.fromkeys(sorted(members, key=order)[: max(1, count)])

    def _decide(self, version: Version) -> None:
        """Move a new version to its next stage if its devices have answered."""
        cluster = version.cluster
        if cluster not in self._method.models:
            return
        if cluster not in self._testers:
            now = time.monotonic()
            if any(device.is_unknown(now) for device in self._devices.values()):
                return
            self._testers[cluster] = self._choose(version)
        testers = {
            name: pair
            for name, pair in self._testers[cluster].items()
            if name in self._devices or pair is not None
        }
        if not testers:
            # All devices that tried it have left; others are chosen.
            del self._testers[cluster]
            return
        if version.stage is Stage.TRIAL:
            if None in testers.values():
                return
            pairs = [pair for pair in testers.values() if pair is not None]
            score = _mean(new for new, _ in pairs)
            version = self.store.change(version, Stage.CANARY, score)
            self._unsaved = True
            if cluster in self.store.pinned:
                self._hold(version, "an operator has chosen the version in use", logging.INFO)
                return
            if not is_no_worse(pairs, self._margin, self.store.of_errors):
                used = _mean(used for _, used in pairs)
                found = f"{self._measure.word} {score:.4g}, {used:.4g} of the one in use"
                self._hold(version, f"{found}, on {plural(len(pairs), 'device')}")
                return
        canaries = [name for name in testers if name in self._devices and self._devices[name].uses]
        if all(self._devices[name].has == version.key for name in canaries):
            self.store.change(version, Stage.IN_USE)
            self._close(version, Stage.IN_USE)
            log.info(
                "Version %d of cluster %d is in use: %s %.4g",
                version.number,
                cluster,
                self._measure.word,
                version.score,
            )

    def _hold(self, version: Version, reason: str, level: int = logging.WARNING) -> None:
        self.store.change(version, Stage.HELD)
        self._close(version, Stage.HELD, reason)
        held = "Version %d of cluster %d is held: %s"
        log.log(level, held, version.number, version.cluster, reason)

    def _close(self, version: Version, outcome: Stage, reason: str = "") -> None:
        self.outcomes[outcome] += 1
        self._testers.pop(version.cluster, None)
        self._records.clear()
        self._unsaved = self._has_news = True
        self._report(version, outcome, reason)

    def _report(self, version: Version, outcome: Stage, reason: str) -> None:
        score = version.score if math.isfinite(version.score) else None
        now, report = self._method.now(), self._method.report
        report(VersionDecided(now, *version.key, outcome.value, score, reason))

    # Messages.

    def _target(self, client: str) -> Version | None:
        """Return the version that a device should use."""
        cluster = self._method.clusters.main(client)
        new = self.store.new(cluster)
        if new and new.stage is Stage.CANARY and client in self._testers.get(cluster, ()):
            return new
        return self.current(cluster)

    def _ask(self, client: str, device: _Device, now: float) -> None:
        """Send a device the next message, if one is due."""
        try:
            due = self._due(client, device)
        except (OSError, SafetensorError) as error:
            cluster = self._method.clusters.main(client)
            log.warning("A version of cluster %d cannot be read: %s", cluster, error)
            device.until = now + _RETRY_SECONDS
            return
        if due is None:
            return
        asked, kind, content = due
        message_id = self._state.push(Message(content, device.node, kind, ttl=_MESSAGE_SECONDS))
        device.until = now + (_RETRY_SECONDS if message_id is None else _MESSAGE_SECONDS)
        if message_id is not None:
            device.message, device.asked = message_id, asked
            self.open[message_id] = client

    def _due(
        self, client: str, device: _Device
    ) -> tuple[tuple[str, Version | None], str, RecordDict] | None:
        """Return the next request to a device, with the type and the content of the message.

        It asks whether an application uses the model, or to test or to use a version.

        Raises
        ------
        OSError, SafetensorError
            The file of a version cannot be read.
        """
        own = self._method.feature_settings
        settings: dict[str, Any] = {KIND: USE}
        if device.uses is None:
            return (_PROBE, None), MessageType.QUERY, _content({}, settings)
        cluster = self._method.clusters.main(client)
        new = self.store.new(cluster)
        is_tester = self._testers.get(cluster, {}).get(client, ()) is None
        if new and new.stage is Stage.TRIAL and is_tester:
            models = [new, *([used] if (used := self.current(cluster)) else [])]
            records = {
                candidate(place): self._record(version, client)
                for place, version in enumerate(models)
            }
            step = self._method.step_of(client) or 0
            settings = {
                KIND: TEST_STEPS,
                STEP: step,
                TESTED_STEPS: [step] * len(models),
                TESTED_MODELS: list(range(len(models))),
            }
            return (_TRY, new), MessageType.EVALUATE, _content(records, settings | own)
        target = self._target(client) if device.uses else None
        if target is None or device.has == target.key:
            return None
        settings |= {
            USED_RUN: self.store.run_id,
            USED_CLUSTER: target.cluster,
            USED_VERSION: target.number,
        }
        records = {ARRAYS: self._record(target, client)}
        return (_USE, target), MessageType.QUERY, _content(records, settings | own)

    def _record(self, version: Version, client: str) -> ArrayRecord:
        """Return the record with the model of a version, as it serves a client."""
        has_own = self.store.has_own(version, client)
        if not has_own and version.key in self._records:
            return self._records[version.key]
        arrays, spec = self.store.load(version, client if has_own else ""), self._method.spec
        flat = np.concatenate([arrays[name].reshape(-1) for name in spec.names])
        record = spec.pack(np.asarray(flat, np.float32))
        if not has_own:
            self._records[version.key] = record
        return record

    def take(self, reply: Message) -> bool:
        """Process a device's answer; return False for a reply to another message."""
        message_id = reply.metadata.reply_to_message_id
        if message_id not in self.open:
            return False
        client, self._has_news = self.open.pop(message_id), True
        device = self._devices.get(client)
        if device is not None and device.message == message_id:
            self._take(client, device, reply)
        return True

    def _take(self, client: str, device: _Device, reply: Message) -> None:
        (asked, version), device.message, device.until = device.asked, "", 0.0
        if asked == _TRY:
            self._process_scores(client, version, reply)
            return
        failed = reply.has_error()
        told: Mapping[str, object] = {}
        if not failed:
            told = reply.content.config_records.get(CONFIG, {})
            metrics: Mapping[str, object] = next(iter(reply.content.metric_records.values()), {})
            device.uses = metrics.get(USES) == 1
        elif asked == _PROBE:
            # A device with another app, which does not support the request.
            device.uses = False
        cluster, number = told.get(USED_CLUSTER), told.get(USED_VERSION)
        is_ours = told.get(USED_RUN) == self.store.run_id
        if is_ours and isinstance(cluster, int) and isinstance(number, int):
            device.has = cluster, number
        if asked == _USE and version and device.has == version.key:
            device.failures = 0
        elif asked == _USE and version:
            device.until = time.monotonic() + _RETRY_SECONDS * 2 ** min(device.failures, 6)
            device.failures += 1
            reason = error_line(reply) if failed else "its application's file is gone"
            log.warning(
                "%s does not use version %d of cluster %d: %s",
                client,
                version.number,
                version.cluster,
                reason,
                extra=about(client, cluster=version.cluster),
            )
            new = self.store.new(version.cluster)
            if new and new.key == version.key:
                self._hold(new, f"{client} could not use it")

    def _process_scores(self, client: str, version: Version | None, reply: Message) -> None:
        """Process a device's scores of a new version and of the one in use."""
        new = None if version is None else self.store.new(version.cluster)
        if version is None or new is None or new.key != version.key:
            return
        testers = self._testers.get(version.cluster, {})
        if client not in testers:
            return
        count = 1 + (self.current(version.cluster) is not None)
        try:
            _, scores = read_scores(reply, count)
        except InvalidReplyError:
            scores = []
        first, *others = scores or [math.nan]
        testers[client] = first, others[0] if others else math.nan

    # Commands of an operator.

    def devices_with(self, version: Version) -> int:
        """Return the number of online devices that have a version."""
        return sum(device.has == version.key for device in self._devices.values())

    def rollback(self, cluster: int, to: int | None) -> Version | None:
        """Let a cluster's devices use a stored version until an operator changes that.

        Parameters
        ----------
        cluster : int
            The cluster.
        to : int, optional
            Number of the version; None lets new versions come into use again.

        Returns
        -------
        Version or None
            The version in use.

        Raises
        ------
        UserError
            There is no such cluster or version, or the choice cannot be saved.
        """
        clusters, store = self._method.clusters, self.store
        if cluster not in clusters.models:
            heirs = ", ".join(map(str, clusters.continuations(cluster)))
            there = (
                f"its devices are in {heirs}" if heirs else f"there are {_listed(clusters.models)}"
            )
            raise UserError(f"There is no cluster {cluster}: {there}.")
        if to is None:
            store.pinned.discard(cluster)
        else:
            version = store.at(cluster, to)
            if version is None or version.stage.is_new:
                found = [each.number for each in store.of(cluster) if not each.stage.is_new]
                raise UserError(
                    f"Version {to} of cluster {cluster} is not kept; there are {_listed(found)}."
                )
            if new := store.new(cluster):
                self._hold(new, "an operator has rolled back to another version")
            store.pinned.add(cluster)
            store.change(version, Stage.IN_USE)
            log.warning("Version %d of cluster %d is in use: an operator's choice", to, cluster)
            self._report(version, Stage.IN_USE, "an operator's choice")
        self._has_news, self._records = True, {}
        try:
            store.save()
        except OSError as error:
            self._unsaved = True
            raise UserError(
                f"The version is in use, but the choice could not be saved and will be lost at a "
                f"restart: {error.strerror}."
            ) from None
        return store.in_use(cluster)

    def _save(self) -> None:
        try:
            self.store.save()
        except OSError as error:
            self._warn(error)
        else:
            self._unsaved = False

    def _warn(self, error: OSError) -> None:
        """Warn once that versions cannot be stored."""
        if not self._warned:
            log.warning(
                "Versions cannot be stored: %s. The run continues, and storing is tried again",
                error.strerror,
            )
        self._warned = True


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def _content(records: Mapping[str, ArrayRecord], settings: dict[str, Any]) -> RecordDict:
    return RecordDict({**records, CONFIG: ConfigRecord(settings)})


def _mean(scores: Iterable[float]) -> float:
    """Return the mean of the finite scores; NaN without any."""
    known = [score for score in scores if math.isfinite(score)]
    return fmean(known) if known else math.nan
