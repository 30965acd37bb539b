"""The Flower ClientApp: one device that trains, tests and answers queries about itself.

It is the same on every grid, and works with Flower's own strategies. A reply depends on nothing
but the content of the message and the client that answers, so that messages may be answered early,
in any order and in any process.

What a message asks for is its kind of work: one of :data:`raceme.core.registry.CLIENT_WORK`, loaded
when it is first asked for, or ``module:function`` for one of a user's own. It is a function of a
:class:`~raceme.training.work.ClientWork` that returns an :class:`~raceme.training.work.Answer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from raceme.core import messages as names
from raceme.core.messages import to_array
from raceme.core.registry import CLIENT_WORK
from raceme.flower.messages import array_record
from raceme.training import machine as hardware
from raceme.training.clients import Client, ClientCache, OwnData, joined, load
from raceme.training.machine import Meter, measured, meter_of
from raceme.training.privacy import check_kind, local_dp, privacy_of
from raceme.training.work import Answer, ClientWork, answer_to, step_in

# Clients work side by side, each on one thread: two processes of one thread get through nearly
# twice the work of one process with two.
torch.set_num_threads(1)

_UNKNOWN_GROUP = -1
_ECHOED = (names.TASK, names.VERSION, names.KIND, names.STEP)
"""Settings that a reply states as it was told them, so that it can be told what it answers."""

_clients = ClientCache(load)


def train(message: Message, context: Context) -> Message:
    """Do work that takes a device's time."""
    return _respond(message, context)


def evaluate(message: Message, context: Context) -> Message:
    """Test a model, or do what else is asked for."""
    return _respond(message, context)


def query(message: Message, context: Context) -> Message:
    """State the client's id and its data, or answer another question about the client."""
    return _respond(message, context)


def client_app(mods: Sequence[Mod] = ()) -> ClientApp:
    """Make Raceme's ClientApp with mods of Flower's around training.

    A Flower app of your own names it in place of Raceme's, with ``fixedclipping_mod`` for example::

        app = client_app([fixedclipping_mod])

    Parameters
    ----------
    mods : Sequence[Mod]
        The first one is the outermost. The device's own local differential privacy is innermost.
    """
    made = ClientApp()
    made.train(mods=[*mods, local_dp])(train)
    made.evaluate()(evaluate)
    made.query()(query)
    return made


app = client_app()


def is_private(context: Context) -> bool:
    """Return whether a device has local differential privacy, which only the app provides."""
    return privacy_of(context) is not None


def describe(work: ClientWork) -> Answer:
    """State the client's stable id, its data and their true group, and the machine it runs on."""
    client = work.client
    metrics = {
        names.NUM_EXAMPLES: len(client.train),
        names.NUM_TEST_EXAMPLES: len(client.test),
        names.GROUP: _UNKNOWN_GROUP if client.group is None else client.group,
    }
    return Answer(metrics, told={names.CLIENT_ID: client.id, **hardware.describe()})


_DEFAULTS = {
    MessageType.TRAIN: names.TRAIN,
    MessageType.EVALUATE: names.EVALUATE,
    MessageType.QUERY: names.DESCRIBE,
}
"""Kinds of work where a message states none, as Flower's own strategies do not."""


class AddedKinds:
    """Raceme's kinds of work for a user's own ClientApp: a Flower mod, and a function for queries.

    Messages that ask for a kind of work are answered here, all others by the user's functions::

        kinds = AddedKinds(load)
        app = ClientApp(mods=[kinds])
        app.query()(kinds.answer)

    Parameters
    ----------
    load : Callable
        Returns the network and the samples of the client that a context is of; called once for each
        in a process.
    """

    def __init__(self, load: Callable[[Context], OwnData]) -> None:
        self._load = load
        self._loaded: dict[int, Client] = {}

    def __call__(
        self,
        message: Message,
        context: Context,
        call_next: Callable[[Message, Context], Message],
    ) -> Message:
        """Answer a message that asks for a kind of work; leave others to the user's functions."""
        if _settings(message).get(names.KIND, names.TRAIN) == names.TRAIN:
            return call_next(message, context)
        return self.answer(message, context)

    def answer(self, message: Message, context: Context) -> Message:
        """Answer a query, or any message, in Raceme's way."""
        work = work_of(message, context, self._client)
        return reply_to(message, work, answer_to(work))

    def _client(self, context: Context) -> Client:
        """Return the client that a context is of."""
        if context.node_id not in self._loaded:
            self._loaded[context.node_id] = self._load(context).client(context)
        return self._loaded[context.node_id]


def work_of(
    message: Message, context: Context, own: Callable[[Context], Client] | None = None
) -> ClientWork:
    """Read what a message asks of the client that a node is.

    Parameters
    ----------
    message : Message
        The server's request: kind of work, models and settings.
    context : Context
        The node's context: its configuration names the client, its state persists between messages.
    own : Callable, optional
        Returns the client of a user's own app; its data never change.

    Raises
    ------
    ValueError
        The kind is unknown, or a step is none.
    UserError
        The client's data cannot be loaded.
    """
    settings = _settings(message)
    kind = settings.get(names.KIND, _DEFAULTS[message.metadata.message_type.partition(".")[0]])
    if not isinstance(kind, str) or kind not in CLIENT_WORK:
        known = ", ".join(CLIENT_WORK)
        raise ValueError(f"This client does no work of the kind {kind!r}; it knows {known}.")
    step = step_in(settings, names.STEP)
    share = settings.get(names.VALIDATION_SHARE, 0.0)
    if not isinstance(share, int | float):
        raise ValueError(f"{names.VALIDATION_SHARE} must be a number, got {share!r}.")

    def at_step(step: int) -> Client:
        return _kept(_clients.client(context, step) if own is None else own(context), share)

    client, steps = at_step(step), list[Client]()
    if own is None and names.STEPS in settings:
        several = _clients.clients(context, _several(settings[names.STEPS]))
        steps = [_kept(loaded, share) for loaded in several]
        client = joined(client, steps)
    return ClientWork(
        kind,
        client,
        message.content,
        settings,
        context.state,
        at_step,
        tuple(steps),
        0 if own is not None else _clients.since(context),
    )


def _settings(message: Message) -> ConfigRecord:
    """Return what a message says of how to do the work; nothing if it does not say it."""
    record = message.content.get(names.CONFIG)
    return record if isinstance(record, ConfigRecord) else ConfigRecord()


def _kept(client: Client, share: float) -> Client:
    """Return a client that keeps a share of its training samples for validation, if any."""
    return client.divided(share) if share else client


def _several(steps: object) -> list[int]:
    """Check the steps that a message names.

    Raises
    ------
    ValueError
        They are no steps, none, or one is named twice.
    """
    found = [step for step in steps if isinstance(step, int)] if isinstance(steps, list) else []
    if not found or steps != found or min(found) < 0 or len(set(found)) < len(found):
        raise ValueError(
            f"{names.STEPS} must be different whole numbers of at least 0, got {steps!r}."
        )
    return found


def reply_to(message: Message, work: ClientWork, answer: Answer) -> Message:
    """Make the reply to a message out of the answer to its work."""
    echoed = {name: work.settings[name] for name in _ECHOED if name in work.settings}
    content = RecordDict()
    if answer.model is not None:
        content[names.ARRAYS] = answer.model
    content[names.METRICS] = MetricRecord(dict(answer.metrics))
    if answer.numbers:
        arrays = {name: to_array(values) for name, values in answer.numbers.items()}
        content[names.NUMBERS] = array_record(arrays)
    if echoed or answer.told:
        content[names.CONFIG] = ConfigRecord({**echoed, **answer.told})
    return Message(content=content, reply_to=message)


def forget() -> None:
    """Drop the data of all clients: for a process that begins another run."""
    _clients.forget()


def _respond(message: Message, context: Context) -> Message:
    if not _settings(message).get(names.REPORT_TIMING, False):
        return reply_to(message, *_answered(message, context))
    started_at = time.time()
    with measured(_meter()) as cost:
        work, answer = _answered(message, context)
    times = {names.STARTED_AT: started_at, names.FINISHED_AT: time.time(), **cost}
    return reply_to(message, work, replace(answer, metrics={**answer.metrics, **times}))


def _answered(message: Message, context: Context) -> tuple[ClientWork, Answer]:
    work = work_of(message, context)
    check_kind(work.kind, context)
    return work, answer_to(work)


@cache
def _meter() -> Meter | None:
    """Return what measures this machine's energy; look for it once."""
    return meter_of()
