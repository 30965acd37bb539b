"""Messages to an executor, contexts of their nodes, and replies."""

from __future__ import annotations

from flwr.app import Context, Message, RecordDict

from raceme.flower.messages import identify_process, set_message_id
from raceme.simulation import Executor

_made = iter(range(10**9))


def context_of(node: int = 1, **run_config: object) -> Context:
    config = {"name": "a run", **run_config}
    return Context(1, node, {"partition-id": node - 1}, RecordDict(), config)


def message_to(node: int, action: str, **records: object) -> Message:
    identify_process(run_id=1)
    message = Message(RecordDict(records), node, action, ttl=500.0, group_id="7")
    set_message_id(message, f"{next(_made):08d}")
    return message


def ask(executor: Executor, message: Message, context: Context, due: float = 0.0) -> Message:
    executor.submit(message, context, due)
    return executor.result(message.metadata.message_id)
