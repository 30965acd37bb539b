"""Traces: what an earlier run has recorded of its devices, played again on virtual time.

Each client takes for its tasks as long as it took then, one after the other, from sending to reply,
and is online when it was online then. What is sent and what is learned from it may be something
else entirely: so another method can be tried on the fleet that one has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from raceme.config.errors import UserError
from raceme.records.record import RunRecord, read_run
from raceme.simulation.devices import Device

PREFIX = "trace:"
"""Begins the name of a device profile that is the folder of a run."""


_SERVER_SECONDS = 1.0
"""A longer time between a reply and the next task is not the server's work."""
_MOMENT = 1e-3


class Leg(NamedTuple):
    """How one task went.

    Attributes
    ----------
    seconds : float
        From sending it to having its reply.
    lost : bool
        The reply was unusable.
    """

    seconds: float
    lost: bool


@dataclass(frozen=True)
class TracedDevice(Device):
    """A device that takes for its tasks as long as one did before.

    Attributes
    ----------
    legs : tuple[Leg, ...]
        Its tasks in order; after the last one it begins again.
    """

    legs: tuple[Leg, ...] = ()

    def duration(
        self,
        examples: int,
        epochs: float,
        bytes_down: int,
        bytes_up: int,
        scale: float,
        rng: np.random.Generator,
        task: int = 0,
        share: float = 1.0,
    ) -> float:
        """Return the recorded time of a task, whatever its size."""
        return self.legs[task % len(self.legs)].seconds

    def mean_duration(
        self, examples: int, epochs: float, bytes_down: int, bytes_up: int, scale: float = 1.0
    ) -> float:
        """Return the mean of the recorded times."""
        return fmean(leg.seconds for leg in self.legs)

    def fails(self, task: int) -> bool:
        """Return whether the recorded task was lost."""
        return self.legs[task % len(self.legs)].lost


def traced_fleet(folder: str, clients: int) -> tuple[list[Device], list[str]]:
    """Make the devices of a recorded run, and say who they are.

    Parameters
    ----------
    folder : str
        The run's folder.
    clients : int
        Number of devices.

    Returns
    -------
    tuple[list[Device], list[str]]
        Devices and their recorded ids. ``client-3`` is the fourth; ids of another form follow the
        order of the text.

    Raises
    ------
    UserError
        There is no such run, it has no updates, or its clients are not as many.
    """
    if not folder:
        raise UserError("--devices trace: needs the folder of a run, as in trace:runs/mine.")
    record = read_run(Path(folder).expanduser())
    names = _clients(folder, record, clients)
    legs = {name: _legs(record, name) for name in names}
    periods = {client.client: client.online for client in record.clients}
    devices: list[Device] = [
        TracedDevice(online=_online(periods.get(name, ())), legs=legs[name]) for name in names
    ]
    return devices, names


def _clients(folder: str, record: RunRecord, clients: int) -> list[str]:
    """Return the recorded clients in the order of the simulated ones."""
    recorded = {str(name) for name in record.updates.client}
    if not recorded:
        raise UserError(f"The run in {folder} has no updates: there are no times to replay.")
    numbered = [f"client-{index}" for index in range(clients)]
    names = numbered if recorded <= set(numbered) else sorted(recorded)
    if set(names) != recorded or len(names) != clients:
        shown = ", ".join(sorted(recorded)[:5]) + (", …" if len(recorded) > 5 else "")
        raise UserError(
            f"The run in {folder} has updates of {len(recorded)} clients ({shown}), this one has "
            f"{clients} clients: use --clients {len(recorded)}."
        )
    return names


def _legs(record: RunRecord, name: str) -> tuple[Leg, ...]:
    """Return a client's tasks in the order in which it was given them."""
    tasks = sorted(
        (float(sent), float(returned), lost)
        for rows, lost in ((record.updates, False), (record.rejections, True))
        for sent, returned, client in zip(rows.dispatched_at, rows.time, rows.client, strict=True)
        if client == name
    )
    # In rounds a client waits for the others, which is not its own time.
    asynchronous = bool(record.updates.staleness.any())
    joined = {client.client: client.joined_at for client in record.clients}
    legs, before = [], joined.get(name, -math.inf)
    for sent, returned, lost in tasks:
        # What the server took to hand out the next task belongs to the recorded rhythm.
        gap = sent - before
        seconds = returned - sent + (gap if asynchronous and 0 < gap < _SERVER_SECONDS else 0.0)
        legs.append(Leg(seconds, lost))
        # After an unusable reply a method lets the client rest: a replay does so by itself.
        before = -math.inf if lost else returned
    # What it was at when the run ended took longer than until then: a replay in which it would
    # come back earlier could not be the recorded run.
    open_for = record.end - max(returned for _, returned, _ in tasks)
    if legs[0].seconds <= open_for:
        legs.append(Leg(open_for + _MOMENT, lost=False))
    return tuple(legs)


def _online(
    periods: Sequence[tuple[float, float | None]],
) -> tuple[tuple[float, float], ...]:
    """Return when a client was online; empty if it always was."""
    spans = [(start, math.inf if end is None else end) for start, end in periods]
    spans = [(start, end) for start, end in spans if end > start]
    if spans == [(0.0, math.inf)]:
        return ()
    # Two periods that touch are one.
    gaps = [(end, start) for (_, end), (start, _) in pairwise(spans) if start > end]
    starts = [spans[0][0], *(start for _, start in gaps)] if spans else []
    ends = [*(end for end, _ in gaps), spans[-1][1]] if spans else []
    return tuple(zip(starts, ends, strict=True))
