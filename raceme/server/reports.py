"""What the loop reports of clients, updates and answers, and what a run leaves."""

from __future__ import annotations

import math
import time as clock
from collections.abc import Mapping
from logging import getLogger

from flwr.app import Message

from raceme.protocol.events import AnswerTaken, ClientJoined, UpdateApplied, UpdateRejected
from raceme.protocol.messages import (
    ACCURACY_AFTER,
    ACCURACY_BEFORE,
    FINISHED_AT,
    SAMPLE_PASSES,
    STARTED_AT,
    count_of,
)
from raceme.server.fleet import Client
from raceme.server.interface import Applied, Questions
from raceme.server.packing import Packer
from raceme.server.replies import Answer, Update

log = getLogger("raceme")


def joined(time: float, client: Client, returned: bool) -> ClientJoined:
    """Report a client that answered its greeting."""
    assert client.node_id is not None, "a client that answered is online"
    return ClientJoined(
        time, client.client_id, client.node_id, client.num_examples, client.group, returned
    )


def applied_update(
    time: float,
    seq: int,
    update: Update,
    applied: Applied,
    exchanges: bool,
    highest_score: float,
) -> UpdateApplied:
    """Report what became of a valid update.

    Parameters
    ----------
    time : float
        When it arrived.
    seq : int
        Its number.
    update : Update
        It.
    applied : Applied
        What the method did with it.
    exchanges : bool
        Whether models really travel; without it there is no traffic to report.
    highest_score : float
        Up to which a score that the client states can be meant.
    """
    task = update.task
    before, after = (
        score if 0 <= score <= highest_score and math.isfinite(score) else None
        for score in (update.metrics.get(n, math.nan) for n in (ACCURACY_BEFORE, ACCURACY_AFTER))
    )
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
        bytes_down=task.bytes_down if exchanges else 0,
        bytes_up=update.bytes_up if exchanges else 0,
        started_at=_run_time(update.metrics.get(STARTED_AT, math.nan), time),
        finished_at=_run_time(update.metrics.get(FINISHED_AT, math.nan), time),
        step=task.step,
        accuracy_before=before,
        accuracy_after=after,
        passes=count_of(update.metrics.get(SAMPLE_PASSES)),
        mixture=update.mixture,
        phase=task.phase or task.kind,
        cpu_seconds=update.cost.cpu_seconds,
        joules=update.cost.joules,
    )


def answer_taken(time: float, answer: Answer, exchanges: bool) -> AnswerTaken:
    """Report a valid answer to work that was not training.

    Parameters
    ----------
    time : float
        When it arrived.
    answer : Answer
        It.
    exchanges : bool
        Whether models really travel; without it there is no traffic to report.
    """
    task = answer.task
    return AnswerTaken(
        time=time,
        client=task.client,
        kind=task.kind,
        phase=task.phase or task.kind,
        bytes_down=task.bytes_down if exchanges else 0,
        bytes_up=answer.bytes_up if exchanges else 0,
    )


def fill_result(method: Questions, packer: Packer) -> None:
    """Put models and placements into the result of a run."""
    result = method.result
    result.clusters = {
        cluster: packer.pack(cluster, model)[0] for cluster, model in method.served.items()
    }
    if result.clusters:
        result.arrays = result.clusters[method.clusters.largest()]
    result.client_clusters = {
        client: dict(method.placement(client)) for client in method.progress.fleet.clients
    }


def unasked(time: float, reply: Message, by_node: Mapping[int, str]) -> UpdateRejected:
    """Report a reply that nobody waits for, and say it: it changes nothing.

    Parameters
    ----------
    time : float
        When it arrived.
    reply : Message
        It: repeated, sent without being asked for, or come after its task was given up.
    by_node : Mapping[int, str]
        Client on each node that is known.
    """
    node = reply.metadata.src_node_id
    client = by_node.get(node, f"node {node}")
    reason = "nobody waits for it: it was not asked for, is a repetition, or came too late"
    log.warning("A reply of %s is ignored: %s", client, reason)
    return UpdateRejected(time, client, reason, time)


def _run_time(stated: float, now: float) -> float | None:
    """Return what a client states on its machine's clock as a time of the run, if it does."""
    return now - (clock.time() - stated) if math.isfinite(stated) else None
