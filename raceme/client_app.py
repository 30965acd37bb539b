"""The Flower ClientApp: one device that trains, tests and answers queries about itself.

It is the same on every grid, and works with Flower's own strategies. A reply depends on nothing
but the content of the message and the client that answers, so that messages may be answered early,
in any order and in any process.

What a message asks for is its kind of work, one of ``KINDS``. A new kind is one function, of a
:class:`~raceme.training.work.ClientWork` and returning an
:class:`~raceme.training.work.Answer`, and its line there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from raceme.core.messages import (
    ARRAYS,
    CLIENT_ID,
    CONFIG,
    DESCRIBE,
    DESCRIPTORS,
    EVALUATE,
    FINISHED_AT,
    GRADIENT,
    GROUP,
    KIND,
    LABEL_COUNTS,
    LABEL_MASSES,
    LATENT_MOST,
    LEARN,
    LEND,
    LOSSES,
    MATCH,
    METRICS,
    NUM_EXAMPLES,
    NUM_TEST_EXAMPLES,
    NUMBERS,
    PRINCIPAL_DIRECTIONS,
    REPORT_TIMING,
    SCORES,
    STARTED_AT,
    STEP,
    STEPS,
    TASK,
    TEST_STEPS,
    TRAIN,
    TRAIN_BEST,
    TRAIN_BORROWING,
    TRAIN_DECOMPOSED,
    TRAIN_ELASTIC,
    TRAIN_MIXED,
    TRAIN_OWN,
    TRAIN_WEIGHTED,
    VALIDATION_SHARE,
    VERSION,
    to_array,
)
from raceme.flower.messages import array_record
from raceme.training import continual, kinds, statistics
from raceme.training import continual as task_parts
from raceme.training import kinds as memory
from raceme.training import machine as hardware
from raceme.training import statistics as responsibilities
from raceme.training.clients import Client, ClientCache, OwnData, joined, load
from raceme.training.machine import Meter, measured, meter_of
from raceme.training.privacy import check_kind, local_dp, privacy_of
from raceme.training.work import Answer, ClientWork

# Clients work side by side, each on one thread: two processes of one thread get through nearly
# twice the work of one process with two.
torch.set_num_threads(1)

_UNKNOWN_GROUP = -1
_ECHOED = (TASK, VERSION, KIND, STEP)
"""Settings that a reply states as it was told them, so that it can be told what it answers."""

_clients = ClientCache(load)


def train(message: Message, context: Context) -> Message:
    """Do work that takes a device's time."""
    return _respond(message, context)


def evaluate(message: Message, context: Context) -> Message:
    """Test a model, or do what else is asked for."""
    return _respond(message, context)


def query(message: Message, context: Context) -> Message:
    """Say who this client is, or what else is asked for."""
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
        NUM_EXAMPLES: len(client.train),
        NUM_TEST_EXAMPLES: len(client.test),
        GROUP: _UNKNOWN_GROUP if client.group is None else client.group,
    }
    return Answer(metrics, told={CLIENT_ID: client.id, **hardware.describe()})


KINDS: dict[str, Callable[[ClientWork], Answer]] = {
    TRAIN: kinds.train,
    TRAIN_BEST: kinds.train_best,
    TRAIN_MIXED: kinds.train_mixed,
    TRAIN_OWN: kinds.train_own,
    LEARN: memory.learn,
    MATCH: memory.match,
    LEND: memory.lend,
    TRAIN_ELASTIC: continual.train_elastic,
    TRAIN_DECOMPOSED: task_parts.train_decomposed,
    TRAIN_BORROWING: task_parts.train_borrowing,
    EVALUATE: kinds.evaluate,
    TEST_STEPS: kinds.test_steps,
    LOSSES: kinds.losses,
    SCORES: kinds.scores,
    LABEL_COUNTS: kinds.label_counts,
    PRINCIPAL_DIRECTIONS: statistics.principal_directions,
    LATENT_MOST: statistics.latent_most,
    DESCRIPTORS: statistics.descriptors,
    GRADIENT: statistics.gradient,
    LABEL_MASSES: responsibilities.label_masses,
    TRAIN_WEIGHTED: responsibilities.train_weighted,
    DESCRIBE: describe,
}

_DEFAULTS = {MessageType.TRAIN: TRAIN, MessageType.EVALUATE: EVALUATE, MessageType.QUERY: DESCRIBE}
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
        record = message.content.get(CONFIG)
        asks = isinstance(record, ConfigRecord) and record.get(KIND, TRAIN) != TRAIN
        return self.answer(message, context) if asks else call_next(message, context)

    def answer(self, message: Message, context: Context) -> Message:
        """Answer a query, or any message, in Raceme's way."""
        work = work_of(message, context, self._client)
        return reply_to(message, work, KINDS[work.kind](work))

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
        What is asked.
    context : Context
        The node's.
    own : Callable, optional
        Returns the client, where a user's own app says who it is; its data never change.

    Raises
    ------
    ValueError
        The kind is unknown, or a step is none.
    UserError
        The client's data cannot be loaded.
    """
    record = message.content.get(CONFIG)
    settings = record if isinstance(record, ConfigRecord) else ConfigRecord()
    kind = settings.get(KIND, _DEFAULTS[message.metadata.message_type.partition(".")[0]])
    step = settings.get(STEP, 0)
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join(KINDS)
        raise ValueError(f"This client does no work of the kind {kind!r}; it knows {known}.")
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"{STEP} must be a whole number of at least 0, got {step!r}.")
    share = settings.get(VALIDATION_SHARE, 0.0)
    if not isinstance(share, int | float):
        raise ValueError(f"{VALIDATION_SHARE} must be a number, got {share!r}.")
    if own is not None:
        mine = _kept(own(context), share)
        return ClientWork(
            kind, mine, message.content, settings, context.state, at_step=lambda step: mine
        )
    at_step = partial(_client_at, context, share)
    client = at_step(step)
    since = _clients.since(context)
    if STEPS not in settings:
        records = message.content, settings, context.state
        return ClientWork(kind, client, *records, at_step, since=since)
    steps = [_kept(c, share) for c in _clients.clients(context, _several(settings[STEPS]))]
    client = joined(client, steps)
    records = message.content, settings, context.state
    return ClientWork(kind, client, *records, at_step, tuple(steps), since)


def _client_at(context: Context, share: float, step: int) -> Client:
    """Return the client that a node is, with its data of a step."""
    return _kept(_clients.client(context, step), share)


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
        raise ValueError(f"{STEPS} must be different whole numbers of at least 0, got {steps!r}.")
    return found


def reply_to(message: Message, work: ClientWork, answer: Answer) -> Message:
    """Make the reply to a message out of the answer to its work."""
    echoed = {name: work.settings[name] for name in _ECHOED if name in work.settings}
    content = RecordDict()
    if answer.model is not None:
        content[ARRAYS] = answer.model
    content[METRICS] = MetricRecord(dict(answer.metrics))
    if answer.numbers:
        arrays = {name: to_array(values) for name, values in answer.numbers.items()}
        content[NUMBERS] = array_record(arrays)
    if echoed or answer.told:
        content[CONFIG] = ConfigRecord({**echoed, **answer.told})
    return Message(content=content, reply_to=message)


def forget() -> None:
    """Drop the data of all clients: for a process that begins another run."""
    _clients.forget()


def _respond(message: Message, context: Context) -> Message:
    if not _reports(message):
        return reply_to(message, *_answered(message, context))
    started_at = time.time()
    with measured(_meter()) as cost:
        work, answer = _answered(message, context)
    times = {STARTED_AT: started_at, FINISHED_AT: time.time(), **cost}
    return reply_to(message, work, replace(answer, metrics={**answer.metrics, **times}))


def _reports(message: Message) -> bool:
    """Return whether a message asks when the work was done and what it cost."""
    record = message.content.get(CONFIG)
    return isinstance(record, ConfigRecord) and bool(record.get(REPORT_TIMING, False))


def _answered(message: Message, context: Context) -> tuple[ClientWork, Answer]:
    work = work_of(message, context)
    check_kind(work.kind, context)
    return work, KINDS[work.kind](work)


@cache
def _meter() -> Meter | None:
    """Return what measures this machine's energy; look for it once."""
    return meter_of()
