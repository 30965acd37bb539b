"""Expectations of every executor that runs the small apps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pool_apps
import pytest
from asking import ask, context_of, message_to
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord

from raceme.simulation import Executor, InProcess


def both(executor: Executor, node: int, action: str, **records: object) -> tuple[Message, Message]:
    """Return the replies to a message, computed in this process and by an executor."""
    one, other = (
        ask(each, message_to(node, action, **records), context_of(node))
        for each in (InProcess(pool_apps.app), executor)
    )
    return one, other


def check_records(executor: Executor) -> None:
    """Check that all kinds of records are transported, in order."""
    records = {
        "zeta": ArrayRecord(
            {"b": Array(np.arange(6.0).reshape(2, 3)), "a": Array(np.array([True, False]))}
        ),
        "metrics": MetricRecord({"n": 3, "losses": [0.5, 0.25]}),
        "config": ConfigRecord({"name": "x", "blob": b"\0\1", "flags": [True, False]}),
        "empty": ArrayRecord(),
    }
    one, other = both(executor, 3, "query.echo", **records)
    assert other.content == one.content
    assert list(other.content) == ["zeta", "metrics", "config", "empty", "who"]
    assert dict(other.content["who"]) == {"partition-id": 2, "run": "a run"}
    for name in ("run_id", "src_node_id", "dst_node_id", "group_id", "message_type"):
        assert getattr(other.metadata, name) == getattr(one.metadata, name)


def check_state(executor: Executor) -> None:
    """Check that a client keeps its state in the order of the results."""
    # All are submitted at once, with an empty state;
    # each must see the state that the previous one left.
    context, sent = context_of(), []
    for step in (1, 2, 3):
        sent.append(message_to(1, "query.count", config=ConfigRecord({"step": step})))
        executor.submit(sent[-1], context, due=float(step))
    replies = [executor.result(message.metadata.message_id) for message in sent]
    assert [reply.content["metrics"]["sum"] for reply in replies] == [1, 12, 123]
    assert context.state["seen"]["n"] == 3
    assert ask(executor, message_to(1, "query.echo"), context).has_content()
    assert context.state["seen"]["n"] == 3


def check_cancelling(executor: Executor) -> None:
    """Check that a cancelled message has no result and does not affect the others."""
    context, config = context_of(), ConfigRecord({"step": 1})
    sent = [message_to(1, "query.count", config=config) for _ in range(6)]
    for message in sent:
        executor.submit(message, context, due=0.0)
    for message in sent[::2]:
        executor.cancel(message.metadata.message_id)
    for n, message in enumerate(sent[1::2], start=1):
        assert executor.result(message.metadata.message_id).content["metrics"]["n"] == n
    with pytest.raises(KeyError):
        executor.result(sent[0].metadata.message_id)


def check_repeating(executor: Executor, folder: Path) -> None:
    """Check that the tasks of a process that dies are repeated."""
    config = ConfigRecord({"mark": str(folder / "mark"), "step": 1})
    sent = [
        message_to(1, "query.stumble", config=config),
        message_to(2, "query.count", config=config),
    ]
    for message in sent:
        executor.submit(message, context_of(message.metadata.dst_node_id), due=0.0)
    assert executor.result(sent[0].metadata.message_id).content["config"] == config
    assert executor.result(sent[1].metadata.message_id).content["metrics"]["n"] == 1
