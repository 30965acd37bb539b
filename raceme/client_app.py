"""The Flower ClientApp: one device that trains, tests and answers queries about itself.

It is the same on every grid and works with Flower's own strategies. A reply depends only on the
message and the client, so that messages may be answered early, in any order and in any process.

A message names a kind of work: one of :data:`raceme.core.registry.CLIENT_WORK`, loaded on demand,
or ``module:function`` for a user's own. It is a function of a
:class:`~raceme.training.work.ClientWork` that returns a :class:`~raceme.training.work.WorkResult`.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from numpy.typing import NDArray

from raceme.core import messages as names
from raceme.core.chain import made_of
from raceme.core.config import RunConfig
from raceme.core.gaussian import gaussian_epsilon, gaussian_noise, seeded_key
from raceme.core.messages import Role, to_array
from raceme.core.options import Value
from raceme.core.registry import CLIENT_WORK, FEATURES
from raceme.core.registry import load as load_target
from raceme.flower.messages import array_record
from raceme.training import machine as hardware
from raceme.training.clients import ClientCache, LocalClient, joined, load
from raceme.training.clients import OwnData as OwnData
from raceme.training.work import ClientWork, WorkResult, answer_to, step_in

# One thread per client: two processes of one thread do nearly twice the work of one process with
# two.
torch.set_num_threads(1)

_UNKNOWN_GROUP = -1
_ECHOED = (names.TASK, names.VERSION, names.KIND, names.STEP)
"""Settings that a reply repeats, to identify its request."""

_clients = ClientCache(load)


def train(message: Message, context: Context) -> Message:
    """Do training work."""
    return _respond(message, context)


def evaluate(message: Message, context: Context) -> Message:
    """Test a model, or do other work."""
    return _respond(message, context)


def query(message: Message, context: Context) -> Message:
    """Describe the client, or answer another query."""
    return _respond(message, context)


def refused(message: Message, context: Context) -> Message:
    """Log why the server gives this client no work."""
    # Flower's log is what a SuperNode shows.
    logging.getLogger("flwr").warning("No work for this client: %s", names.reason_of(message))
    return Message(RecordDict(), reply_to=message)


def client_app(mods: Sequence[Mod] = ()) -> ClientApp:
    """Make Raceme's ClientApp with mods of Flower's around training.

    Use it in a Flower app of your own, for example with ``fixedclipping_mod``::

        app = client_app([fixedclipping_mod])

    Parameters
    ----------
    mods : Sequence[Mod]
        The first one is the outermost, but for those of the run's features. The device's own
        local differential privacy is innermost.
    """
    made = ClientApp()
    made.train(mods=[features, *mods, local_dp])(train)
    made.evaluate()(evaluate)
    made.query()(query)
    made.query("refused")(refused)
    return made


def features(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Pass a training message through the client halves of the run's features: a mod."""
    for half in reversed(client_halves(context)):
        call_next = partial(_through, half, call_next)
    return call_next(message, context)


def _through(half: Mod, inner: ClientAppCallable, message: Message, context: Context) -> Message:
    return half(message, context, inner)


def client_halves(context: Context) -> tuple[Mod, ...]:
    """Return the client halves of the run's features, the outermost one first.

    On a device with local differential privacy, those of users' features are left out, as their
    answers get no noise.
    """
    return _client_halves(tuple(context.run_config.items()), is_private(context))


@lru_cache(maxsize=16)
def _client_halves(keys: tuple[tuple[str, Value], ...], private: bool) -> tuple[Mod, ...]:
    config = RunConfig.from_mapping(dict(keys), lenient=True)
    halves: list[Mod] = []
    for name in config.feature_names:
        target = getattr(FEATURES[name], "client", "")
        if target and (FEATURES.is_own(name) or not private):
            feature = made_of(config, name)
            if feature.is_on:
                halves.append(partial(load_target(target), options=feature.options))
    return tuple(halves)


def describe(work: ClientWork) -> WorkResult:
    """Describe the client: stable id, data and their true group, machine."""
    client = work.client
    metrics = {
        names.NUM_EXAMPLES: len(client.train),
        names.NUM_TEST_EXAMPLES: len(client.test),
        names.GROUP: _UNKNOWN_GROUP if client.group is None else client.group,
    }
    labels = {names.LABELS: work.labels} if work.labels else {}
    return WorkResult(metrics, told={names.CLIENT_ID: client.id, **labels, **hardware.describe()})


_DEFAULTS = {
    MessageType.TRAIN: names.TRAIN,
    MessageType.EVALUATE: names.EVALUATE,
    MessageType.QUERY: names.DESCRIBE,
}
"""Kinds of work for messages without one, as of Flower's own strategies."""


class AddedKinds:
    """Raceme's kinds of work for a user's own ClientApp: a Flower mod, and a function for queries.

    Messages with a kind of work are answered here, all others by the user's functions::

        kinds = AddedKinds(load)
        app = ClientApp(mods=[kinds])
        app.query()(kinds.answer)

    Parameters
    ----------
    load : Callable
        Returns network and samples of a context's client; called once per client and process.
    """

    def __init__(self, load: Callable[[Context], OwnData]) -> None:
        self._load = load
        self._loaded: dict[int, LocalClient] = {}

    def __call__(
        self,
        message: Message,
        context: Context,
        call_next: Callable[[Message, Context], Message],
    ) -> Message:
        """Answer a message with a kind of work; pass others to the user's functions."""
        if _settings(message).get(names.KIND, names.TRAIN) == names.TRAIN:
            return call_next(message, context)
        return self.answer(message, context)

    def answer(self, message: Message, context: Context) -> Message:
        """Answer a query, or any message, in Raceme's way."""
        work = work_of(message, context, self._client)
        return reply_to(message, work, answer_to(work))

    def _client(self, context: Context) -> LocalClient:
        """Return the client of a context."""
        if context.node_id not in self._loaded:
            self._loaded[context.node_id] = self._load(context).client(context)
        return self._loaded[context.node_id]


def work_of(
    message: Message, context: Context, own: Callable[[Context], LocalClient] | None = None
) -> ClientWork:
    """Parse the work of a message for a node's client.

    Parameters
    ----------
    message : Message
        The server's request: kind of work, models and settings.
    context : Context
        The node's context: its configuration names the client, its state persists between messages.
    own : Callable, optional
        Returns the client of a user's own app, without drift.

    Raises
    ------
    ValueError
        The kind is unknown, or a step is invalid.
    UserError
        The client's data cannot be loaded.
    """
    settings = _settings(message)
    kind = settings.get(names.KIND, _DEFAULTS[names.category(message)])
    if not isinstance(kind, str) or kind not in CLIENT_WORK:
        known = ", ".join(CLIENT_WORK)
        raise ValueError(f"This client has no work of kind {kind!r}; it knows {known}.")
    step = step_in(settings, names.STEP)
    share = settings.get(names.VALIDATION_SHARE, 0.0)
    if not isinstance(share, int | float):
        raise ValueError(f"{names.VALIDATION_SHARE} must be a number, got {share!r}.")

    def at_step(step: int) -> LocalClient:
        return _kept(_clients.client(context, step) if own is None else own(context), share)

    client, steps = at_step(step), list[LocalClient]()
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
        str(context.node_config.get(names.LABELS, "")),
        str(context.node_config.get(names.MODEL_FILE, "")),
    )


def _settings(message: Message) -> ConfigRecord:
    """Return the settings of a message, empty if it has none."""
    record = message.content.get(names.CONFIG)
    return record if isinstance(record, ConfigRecord) else ConfigRecord()


def _kept(client: LocalClient, share: float) -> LocalClient:
    """Return a client with a share of its training samples held out for validation, if any."""
    return client.divided(share) if share else client


def _several(steps: object) -> list[int]:
    """Check the steps in a message.

    Raises
    ------
    ValueError
        The steps are invalid, empty or repeated.
    """
    found = [step for step in steps if isinstance(step, int)] if isinstance(steps, list) else []
    if not found or steps != found or min(found) < 0 or len(set(found)) < len(found):
        raise ValueError(
            f"{names.STEPS} must be different whole numbers of at least 0, got {steps!r}."
        )
    return found


def reply_to(message: Message, work: ClientWork, answer: WorkResult) -> Message:
    """Convert an answer to the reply to a message."""
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
    """Drop the data of all clients, for a process that begins another run."""
    _clients.forget()


def _respond(message: Message, context: Context) -> Message:
    if not _settings(message).get(names.REPORT_TIMING, False):
        return reply_to(message, *_answered(message, context))
    started_at, began = time.time(), time.process_time()
    work, answer = _answered(message, context)
    times = {
        names.STARTED_AT: started_at,
        names.FINISHED_AT: time.time(),
        names.CPU_SECONDS: time.process_time() - began,
    }
    return reply_to(message, work, replace(answer, metrics={**answer.metrics, **times}))


def _answered(message: Message, context: Context) -> tuple[ClientWork, WorkResult]:
    work = work_of(message, context)
    check_kind(work.kind, context)
    return work, answer_to(work)


# -----------------------------------------------------------------------------
# Local differential privacy of a device: a mod around training.
#
# The owner of a device switches it on, in the node configuration, which no server can change:
#
#     raceme device ... --node-config "local-dp-epsilon=50 local-dp-clip=1.0"
#
# Every trained model then leaves the device clipped, relative to the received one, and with
# Gaussian noise on every weight, of the size that Flower's `LocalDpMod` adds. Any two updates of a
# device are at most twice the clipping norm apart, so this is the sensitivity. That mod draws from
# numpy's Mersenne Twister, whose state 624 outputs reveal; here the noise comes from a cipher.
# -----------------------------------------------------------------------------


EPSILON, DELTA, CLIP, SEED = "local-dp-epsilon", "local-dp-delta", "local-dp-clip", "local-dp-seed"
"""Keys of a node's configuration."""
_ALLOWED = frozenset({names.TRAIN, names.EVALUATE, names.TEST_STEPS, names.DESCRIBE, names.USE})
_PREFIX = "local-dp-"
_DEFAULT_DELTA = 1e-5
_DEFAULT_CLIP = 1.0


@dataclass(frozen=True)
class LocalPrivacy:
    """Privacy settings of a device.

    Attributes
    ----------
    epsilon, delta : float
        Budget of one update, from which the noise derives; see :attr:`sigma` and :meth:`spent`.
    clip : float
        Maximum Euclidean norm of an update.
    seed : int or None
        Seed of the noise, for reproducible simulations only: predictable noise hides nothing. None:
        each update has a random key of the operating system's.
    """

    epsilon: float
    delta: float = _DEFAULT_DELTA
    clip: float = _DEFAULT_CLIP
    seed: int | None = None

    @property
    def sensitivity(self) -> float:
        """Largest distance between two updates."""
        return 2.0 * self.clip

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise on each weight: Δ √(2 ln(1.25/δ)) / ε."""
        return self.sensitivity * math.sqrt(2.0 * math.log(1.25 / self.delta)) / self.epsilon

    def spent(self, updates: int) -> float:
        """Return the ε that a number of updates of one device actually spend at this δ.

        The noise guarantees ε only up to ε = 1; see :func:`raceme.core.gaussian.gaussian_epsilon`.
        """
        return gaussian_epsilon(math.sqrt(updates) * self.sensitivity / self.sigma, self.delta)


def privacy_of(context: Context) -> LocalPrivacy | None:
    """Return the node's privacy settings; None without ``local-dp-epsilon``.

    Raises
    ------
    ValueError
        A value is invalid, or a key is misspelt.
    """
    config = context.node_config
    # A typing error must not disable privacy.
    stated = {key for key in config if key.startswith(_PREFIX)}
    if foreign := sorted(stated - {EPSILON, DELTA, CLIP, SEED}):
        raise ValueError(f"Unknown {', '.join(foreign)}: valid are {EPSILON}, {DELTA}, {CLIP}.")
    if EPSILON not in config:
        unused = sorted(key for key in (DELTA, CLIP, SEED) if key in config)
        if unused:
            raise ValueError(f"{', '.join(unused)} without {EPSILON} has no effect: add {EPSILON}.")
        return None
    epsilon, delta, clip = (
        _positive(context, key, default)
        for key, default in ((EPSILON, 0.0), (DELTA, _DEFAULT_DELTA), (CLIP, _DEFAULT_CLIP))
    )
    if delta >= 1:
        raise ValueError(f"{DELTA} must be below 1, got {delta:g}.")
    seed = config.get(SEED)
    if seed is not None and (not isinstance(seed, int) or seed < 0):
        raise ValueError(f"{SEED} must be a whole number of at least 0, got {seed!r}.")
    return LocalPrivacy(epsilon, delta, clip, seed)


def check_kind(kind: str, context: Context) -> None:
    """Refuse work whose answer would get no noise on a private device.

    Raises
    ------
    ValueError
        The kind of work is refused.
    """
    if privacy_of(context) is not None and kind not in _ALLOWED:
        allowed = ", ".join(sorted(_ALLOWED))
        raise ValueError(
            f"This device has local differential privacy and refuses work of kind '{kind}', whose "
            f"answers get no noise; it accepts {allowed}."
        )


def local_dp(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Flower mod that clips updates and adds noise, if the device has privacy settings.

    All metrics except the number of examples, which the server knows anyway, are removed.

    Raises
    ------
    ValueError
        The settings are invalid, the model has arrays of counts, or the update is not one finite
        model.
    """
    privacy = privacy_of(context)
    if privacy is None:
        return call_next(message, context)
    for record in message.content.array_records.values():
        for name, array in record.items():
            if Role.of(name, array.dtype) is Role.COUNTER:
                raise ValueError(f"'{name}' is a count: noise on it protects nothing.")
    received = [record.to_numpy_ndarrays() for record in message.content.array_records.values()]
    reply = call_next(message, context)
    if not reply.has_error():
        trained = reply.content.array_records
        if len(received) != 1 or len(trained) != 1:
            raise ValueError("Local differential privacy is for work on one model.")
        for name, record in list(trained.items()):
            reply.content[name] = _noisy(record, received[0], privacy, _key_of(privacy, message))
        for name, metrics in list(reply.content.metric_records.items()):
            kept = {key: value for key, value in metrics.items() if key == names.NUM_EXAMPLES}
            reply.content[name] = MetricRecord(kept)
    return reply


def _noisy(
    trained: ArrayRecord, received: Sequence[NDArray[Any]], privacy: LocalPrivacy, key: bytes
) -> ArrayRecord:
    """Return a trained model with its update clipped, and noise on every weight."""
    arrays = [np.asarray(array, np.float64) for array in trained.to_numpy_ndarrays()]
    updates = [now - before for now, before in zip(arrays, received, strict=True)]
    norm = math.sqrt(sum(float(np.vdot(update, update)) for update in updates))
    if not math.isfinite(norm):
        raise ValueError("The trained model is not finite: it does not leave this device.")
    scale = min(1.0, privacy.clip / norm) if norm else 1.0
    noise = gaussian_noise(key, sum(update.size for update in updates))
    made, start = {}, 0
    for (name, array), update, before in zip(trained.items(), updates, received, strict=True):
        own = noise[start : start + update.size].reshape(update.shape)
        start += update.size
        made[name] = Array(np.asarray(before + scale * update + privacy.sigma * own, array.dtype))
    return array_record(made)


def _key_of(privacy: LocalPrivacy, message: Message) -> bytes:
    """Return the key of the noise for one message."""
    if privacy.seed is None:
        return secrets.token_bytes(32)
    settings = message.content.config_records.get(names.CONFIG) or ConfigRecord()
    # Messages of rounds have no task number.
    number = settings.get(names.TASK, settings.get(names.ROUND, 0))
    number = number if isinstance(number, int) else 0
    return seeded_key(privacy.seed, message.metadata.dst_node_id, number)


def _positive(context: Context, key: str, default: float) -> float:
    value = context.node_config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise ValueError(f"{key} must be a number above 0, got {value!r}.")
    return float(value)


def is_private(context: Context) -> bool:
    """Return whether a device has local differential privacy, which only the app applies."""
    return privacy_of(context) is not None


app = client_app()
