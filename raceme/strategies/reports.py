"""The events that every method reports in the same way."""

from __future__ import annotations

import math
import time as clock

from raceme.events import ClientJoined, UpdateApplied
from raceme.messages import FINISHED_AT, STARTED_AT
from raceme.strategies.fleet import Client
from raceme.strategies.model import Applied
from raceme.strategies.replies import Update


def joined(time: float, client: Client, returned: bool) -> ClientJoined:
    """Report a client that answered its greeting."""
    assert client.node_id is not None, "a client that answered is online"
    return ClientJoined(
        time, client.client_id, client.node_id, client.num_examples, client.group, returned
    )


def applied_update(time: float, seq: int, update: Update, applied: Applied) -> UpdateApplied:
    """Report what became of a valid update."""
    task = update.task
    return UpdateApplied(
        seq=seq,
        time=time,
        client=task.client,
        cluster=applied.cluster,
        base_version=task.version,
        staleness=applied.staleness,
        weight=applied.weight,
        dispatched_at=task.sent_at,
        train_loss=update.train_loss,
        bytes_down=task.bytes_down,
        bytes_up=update.bytes_up,
        started_at=_run_time(update, STARTED_AT, time),
        finished_at=_run_time(update, FINISHED_AT, time),
    )


def _run_time(update: Update, name: str, now: float) -> float | None:
    """Return what a client states on its machine's clock as a time of the run, if it does."""
    stated = update.metrics.get(name, math.nan)
    return now - (clock.time() - stated) if math.isfinite(stated) else None
