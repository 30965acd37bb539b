"""Where a run's protection meets its method: updates are judged before the method sees them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from raceme.protocol.verdicts import UpdateJudged, Verdict
from raceme.server.interface import Questions
from raceme.server.replies import InvalidReplyError, Update


def judged(method: Questions, update: Update, now: float) -> Update:
    """Return a valid update as the method is to see it; report what was done to it, if anything.

    A client that is excluded counts as gone for the method, so that nobody waits for it to be
    compared with others; it keeps its cluster, and is tested there as ever.

    Raises
    ------
    InvalidReplyError
        The method is not to see it.
    """
    guard = method.protection
    if not guard.is_on:
        return update
    client = update.task.client
    base = method.base_of(update)
    delta = np.asarray(update.vector - base)
    start = float(np.linalg.norm(method.spec.compared(base)))

    def home(name: str) -> int | None:
        return method.clusters.main(name) if method.clusters.is_placed(name) else None

    awaited = len(method.progress.fleet.by_node) if method.one_model else 0
    ruling = guard.judge(client, method.spec.compared(delta), start, home, awaited)
    if ruling.verdict is Verdict.ACCEPTED:
        return update
    method.report(
        UpdateJudged(
            now, client, ruling.verdict, ruling.measured, ruling.bound, ruling.reason, home(client)
        )
    )
    if client in guard.state.excluded:
        method.remove_client(client)
    if ruling.verdict.keeps_out:
        raise InvalidReplyError(ruling.reason)
    if ruling.verdict is Verdict.READMITTED:
        method.add_client(method.progress.fleet.clients[client])
    if ruling.scale == 1.0:
        return update
    vector = np.asarray(base + np.float32(ruling.scale) * delta, np.float32)
    method.spec.copy_counters(update.vector, vector)
    return replace(update, vector=vector)
