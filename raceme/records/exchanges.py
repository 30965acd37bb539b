"""Messages of a simulated fleet: work and waiting times of devices."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from raceme.core.errors import UserError
from raceme.core.events import grouped
from raceme.core.timeline import Exchange, Switched
from raceme.records.folder import MESSAGES, SUMMARY
from raceme.records.summary import Floats

CLIENTS = "clients.csv"

Span = tuple[float, float]


class ExchangeLog(AbstractContextManager["ExchangeLog"]):
    """Collects a grid's reports and writes ``messages.csv``, a line per message.

    A context manager that removes the file after a UserError.

    Parameters
    ----------
    path : Path
        The file, replaced if it exists.
    names : Mapping[int, str]
        Names of the clients, by node id.
    online : Iterable[int]
        Nodes online at the start.
    """

    def __init__(self, path: Path, names: Mapping[int, str], online: Iterable[int]) -> None:
        self.names = names
        self._online = frozenset(online)
        self._exchanges: list[Exchange] = []
        self._switches: list[Switched] = []
        self._path = path
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        self._writer.writerow(("number", *_columns()))

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._file.close()
        if kind is not None and issubclass(kind, UserError):
            self._path.unlink(missing_ok=True)

    def observe(self, event: Exchange | Switched) -> None:
        """Process a completed message, or an online change."""
        if isinstance(event, Switched):
            self._switches.append(event)
            return
        self._exchanges.append(event)
        task = self._task(event)
        # Only the error; the app's log has the traceback.
        failure = (event.failure or "").strip().partition("\n")[0]
        answered = event.answered if event.answered < math.inf else ""
        row = {**vars(task), "failure": failure, "answered": answered}
        self._writer.writerow((event.number, *(row[name] for name in _columns())))

    def _task(self, event: Exchange) -> TaskRecord:
        client = self.names.get(event.node_id, str(event.node_id))
        same = {name: getattr(event, name) for name in _columns() if name != "client"}
        return TaskRecord(client=client, **same)

    def fleet(self, end: float) -> FleetRecord:
        """Return the fleet's record until the end of the simulation, in seconds."""
        return FleetRecord(
            end=end,
            clients=tuple(self.names.values()),
            tasks=tuple(
                self._task(event)
                for event in sorted(self._exchanges, key=lambda event: event.number)
                if event.node_id in self.names
            ),
            offline=_offline(self.names, self._online, self._switches, end),
        )


@dataclass(frozen=True)
class TaskRecord:
    """A message to a client; see :class:`~raceme.core.timeline.Exchange`."""

    client: str
    kind: str
    sent: float
    begun: float
    ended: float
    answered: float
    failure: str | None
    bytes_down: int
    bytes_up: int

    @property
    def takes_time(self) -> bool:
        """Whether it took the device any time."""
        return self.ended > self.begun


def _columns() -> list[str]:
    return [item.name for item in fields(TaskRecord)]


@dataclass(frozen=True)
class ClientAccount:
    """A client's time in seconds, and traffic.

    Attributes
    ----------
    messages : int
        Number of messages that were sent to it.
    tasks : int
        Number of these that took its time.
    failures : int
        Number of these without a usable reply.
    busy, idle, offline : float
        Its time, in three parts: at work, online without work, and offline.
    held_up : float
        Waiting time for it, summed over the others.
    bytes_down, bytes_up : int
        Bytes that it received and sent.
    """

    client: str
    messages: int
    tasks: int
    failures: int
    busy: float
    idle: float
    offline: float
    held_up: float
    bytes_down: int
    bytes_up: int


@dataclass(frozen=True)
class FleetRecord:
    """The record of a simulated fleet.

    Attributes
    ----------
    end : float
        Virtual time at the end, in seconds.
    clients : tuple[str, ...]
        Ids of all clients, also of those without a message.
    tasks : tuple[Task, ...]
        All messages, in the order of sending.
    offline : Mapping[str, list[Span]]
        Spans of time in which each client was offline, in seconds.
    """

    end: float
    clients: tuple[str, ...]
    tasks: tuple[TaskRecord, ...]
    offline: Mapping[str, Sequence[Span]]

    def moments(self) -> Floats:
        """Return the times at which the server sent work, ascending, and the end."""
        sent = {task.sent for task in self.tasks if task.takes_time and task.sent < self.end}
        return np.array(sorted({*sent, self.end}))

    def awaited(self) -> list[list[str]]:
        """Return the clients that others waited for before each of these times.

        These are the clients whose replies arrived at that time; without any, those whose work was
        lost; otherwise, or if no client was idle, none.
        """
        return [clients if seconds > 0 else [] for clients, seconds in self._waits()]

    def _waits(self) -> list[tuple[list[str], float]]:
        """Return, for each of these times, the clients that ended the wait, and its length.

        An idle online client waits until the server next sends work, or until the end; lengths, in
        seconds, are sums over the clients.
        """
        moments = self.moments()
        waited = np.zeros(len(moments))
        for spans in self.idle().values():
            for start, stop in spans:
                _share_out(waited, moments, start, stop)
        arrivals = grouped((task.answered, task.client) for task in self.tasks if task.takes_time)
        lost = [task for task in self.tasks if task.failure is not None]
        found, before = [], -math.inf
        for moment, seconds in zip(moments.tolist(), waited.tolist(), strict=True):
            given_up = (t.client for t in lost if before <= t.sent < moment < t.answered)
            found.append((arrivals.get(moment) or list(given_up), seconds))
            before = moment
        return found

    def busy(self) -> dict[str, list[Span]]:
        """Return the clients' working periods until the end."""
        spans: dict[str, list[Span]] = {client: [] for client in self.clients}
        for task in self.tasks:
            if task.takes_time and task.begun < self.end:
                spans[task.client].append((task.begun, min(task.ended, self.end)))
        return spans

    def idle(self) -> dict[str, list[Span]]:
        """Return the clients' idle online periods."""
        return {
            client: _complement([*spans, *self.offline.get(client, ())], self.end)
            for client, spans in self.busy().items()
        }

    def accounts(self) -> list[ClientAccount]:
        """Return an account for each client.

        Waiting time is shared by the clients that ended the wait.
        """
        busy, idle = self.busy(), self.idle()
        held_up = dict.fromkeys(self.clients, 0.0)
        for clients, seconds in self._waits():
            for client in clients:
                held_up[client] += seconds / len(clients)
        own: dict[str, list[TaskRecord]] = {client: [] for client in self.clients}
        for task in self.tasks:
            own[task.client].append(task)
        return [
            ClientAccount(
                client=client,
                messages=len(tasks),
                tasks=sum(task.takes_time for task in tasks),
                failures=sum(task.failure is not None for task in tasks),
                busy=_length(busy[client]),
                idle=_length(idle[client]),
                offline=_length(self.offline.get(client, ())),
                held_up=held_up[client],
                bytes_down=sum(task.bytes_down for task in tasks),
                bytes_up=sum(task.bytes_up for task in tasks),
            )
            for client, tasks in own.items()
        ]

    def without_waiting(self) -> float:
        """Return the time of the same number of tasks without any waiting, in seconds.

        Every active device works continuously at its mean time per task.
        """
        whole = (task for task in self.tasks if task.takes_time and task.ended <= self.end)
        lengths = grouped((task.client, task.ended - task.begun) for task in whole)
        rate = math.fsum(len(own) / math.fsum(own) for own in lengths.values())
        return sum(map(len, lengths.values())) / rate if rate else 0.0


def read_fleet(folder: Path) -> FleetRecord:
    """Read the fleet's record from a simulation's folder.

    Raises
    ------
    UserError
        It is missing or damaged.
    """
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        with (folder / MESSAGES).open(newline="", encoding="utf-8") as file:
            rows = sorted(csv.DictReader(file), key=lambda row: int(row["number"]))
        with (folder / CLIENTS).open(newline="", encoding="utf-8") as file:
            clients = tuple(row["client"] for row in csv.DictReader(file))
        return FleetRecord(
            end=float(summary["virtual_time"]),
            clients=clients,
            tasks=tuple(_task(row) for row in rows if row["client"] in clients),
            offline={
                name: [(a, b) for a, b in spans] for name, spans in summary["offline"].items()
            },
        )
    except OSError as error:
        raise UserError(f"Cannot read {error.filename}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"The results in {folder} are damaged: {error!r}.") from None


def _task(row: Mapping[str, str]) -> TaskRecord:
    sent, begun, ended = (float(row[name]) for name in ("sent", "begun", "ended"))
    answered, failure = float(row["answered"] or math.inf), row["failure"] or None
    down, up = int(row["bytes_down"]), int(row["bytes_up"])
    return TaskRecord(row["client"], row["kind"], sent, begun, ended, answered, failure, down, up)


def write_accounts(path: Path, accounts: Sequence[ClientAccount]) -> None:
    """Write ``clients.csv``: a line for each client."""
    names = [item.name for item in fields(ClientAccount)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([getattr(account, name) for name in names] for account in accounts)


def _offline(
    names: Mapping[int, str], online: Collection[int], switches: Sequence[Switched], end: float
) -> dict[str, list[Span]]:
    """Return the offline periods of clients."""
    spans: dict[str, list[Span]] = {}
    gone = {node_id: 0.0 for node_id in names if node_id not in online}
    for event in switches:
        if not event.online:
            gone[event.node_id] = event.time
        else:
            spans.setdefault(names[event.node_id], []).append((gone.pop(event.node_id), event.time))
    for node_id, start in gone.items():
        spans.setdefault(names[node_id], []).append((start, end))
    return spans


def _length(spans: Sequence[Span]) -> float:
    """Return the total length of disjoint spans."""
    return math.fsum(stop - start for start, stop in spans)


def _complement(spans: Sequence[Span], end: float) -> list[Span]:
    """Return the complement of possibly overlapping spans within the time from 0 to the end."""
    left, reached = [], 0.0
    for start, stop in sorted(spans):
        if start > reached:
            left.append((reached, start))
        reached = max(reached, stop)
    if reached < end:
        left.append((reached, end))
    return left


def _share_out(waited: Floats, moments: Floats, start: float, stop: float) -> None:
    """Distribute a span of waiting over the times that ended its parts."""
    first = int(np.searchsorted(moments, start, side="right"))
    last = int(np.searchsorted(moments, stop, side="left"))
    last = min(last, len(moments) - 1)
    edges = np.concatenate([[start], moments[first:last], [stop]])
    waited[first : last + 1] += np.diff(edges)
