"""The ClientApp of a simulation in which some clients attack.

Honest clients answer as in any other run, except that they also measure the success of a backdoor.
Attackers evaluate models honestly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from zlib import crc32

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from raceme import client_app, datasets
from raceme.core.clusters import unit
from raceme.core.config import RunConfig
from raceme.core.messages import (
    ARRAYS,
    BACKDOOR_SUCCESS,
    CHOSEN,
    EVALUATE,
    HALF,
    METRICS,
    TEST_STEPS,
    ModelSpec,
    Role,
    Vector,
    candidate,
    category,
)
from raceme.datasets.source import generator
from raceme.simulation.attacks import (
    OWN_GROUP,
    Attack,
    attack_of,
    attackers_of,
    honest_clients,
)
from raceme.training.clients import LocalClient
from raceme.training.work import ClientWork, Metric, WorkResult, answer_to

_POISONED, _PUSH = "poisoned", "push"
_FIRST_MODEL = "attack-first-model"
"""Record of an attacker's state: the first model that it received."""
_MOST_KNOWN = 10
"""Maximum number of honest clients that an informed attacker knows, and for which it trains."""

app = ClientApp()


def _respond(
    honestly: Callable[[Message, Context], Message], message: Message, context: Context
) -> Message:
    """Return the honest or the attacker's reply to a message."""
    work = client_app.work_of(message, context)
    config, own = work.client.config, int(context.node_config["partition-id"])
    attack = attack_of(config)
    if own not in attackers_of(config):
        reply = honestly(message, context)
        if work.kind == EVALUATE and BACKDOOR_SUCCESS in work.settings:
            reply.content.metric_records[METRICS].update(_success(work, attack))
        return reply
    trains = category(message) == MessageType.TRAIN
    if attack.mimics and trains:
        work = replace(
            work, client=_impersonated(attack.victims(config, own)[0], message, context).client
        )
    if attack.replays and trains and _FIRST_MODEL not in work.state:
        work.state[_FIRST_MODEL] = work.models[0]
    is_spared = HALF in work.settings and not attack.options.attack_probes
    is_attacked = attack.is_due(work.request, config) and not is_spared
    if not is_attacked and not attack.mimics:
        return honestly(message, context)
    known = _others(config, own) if attack.informed and is_attacked else []
    honest = (
        [_change(_impersonated(number, message, context)) for number in known] if trains else []
    )
    work = _poisoned_work(work, attack) if is_attacked else work
    answer = answer_to(work)
    if answer.model is not None and is_attacked:
        changes = [change for change in honest if change is not None]
        answer = _poisoned_answer(work, answer, answer.model, attack, changes)
    if is_attacked and work.kind not in (EVALUATE, TEST_STEPS):
        answer = attack.stated(answer, len(work.models) if CHOSEN in answer.told else 1)
    return client_app.reply_to(message, work, answer)


app.train(mods=[client_app.features])(partial(_respond, client_app.train))
app.evaluate()(partial(_respond, client_app.evaluate))
app.query()(partial(_respond, client_app.query))


def _impersonated(number: int, message: Message, context: Context) -> ClientWork:
    """Return the work that a message would request from another client without stored state."""
    node = {**context.node_config, "partition-id": number}
    run, own = context.run_config, RecordDict()
    return client_app.work_of(message, Context(context.run_id, context.node_id, node, own, run))


def _success(work: ClientWork, attack: Attack) -> dict[str, Metric]:
    """Return the attack's success in the tested model as a metric.

    It is empty if the client has no samples of other classes than the target.
    """
    client = work.client
    if (triggered := attack.triggered(client.test)) is None:
        return {}
    answer = answer_to(replace(work, client=replace(client, test=triggered, _divided={})))
    return {BACKDOOR_SUCCESS: answer.metrics[client.network.objective.measure.name]}


def _change(work: ClientWork) -> Vector | None:
    """Return an honest client's update Δ of the weights; None if it does not train."""
    answer = answer_to(work)
    if answer.model is None:
        return None
    spec = ModelSpec.of(answer.model)
    return spec.compared(spec.unpack(answer.model) - _received(work, answer.told, spec))


def _others(config: RunConfig, own: int) -> list[int]:
    """Return the honest clients that an informed attacker knows, if possible of its group."""
    groups, honest = datasets.true_groups(config), honest_clients(config, own)
    mates = [number for number in honest if groups[number] == groups[own]]
    knows_all = attack_of(config).options.attack_knows != OWN_GROUP or not mates
    return (honest if knows_all else mates)[:_MOST_KNOWN]


def _poisoned_work(work: ClientWork, attack: Attack) -> ClientWork:
    """Return the work with poisoned training and validation samples."""

    def poisoned(client: LocalClient) -> LocalClient:
        rng = generator(client.config.seed, _POISONED, crc32(client.id.encode()))
        train, kept = attack.samples(client.train, client.num_classes, rng), client.validation
        if kept is not None:
            kept = attack.samples(kept, client.num_classes, rng)
        return replace(client, train=train, validation=kept, _divided={})

    return replace(
        work,
        client=poisoned(work.client),
        at_step=lambda step: poisoned(work.at_step(step)),
        steps=tuple(map(poisoned, work.steps)),
    )


def _poisoned_answer(
    work: ClientWork,
    answer: WorkResult,
    model: ArrayRecord,
    attack: Attack,
    honest: Sequence[Vector],
) -> WorkResult:
    """Return an answer with the model that an attacker sends.

    The attack chooses the weights, since only these are compared. Running statistics are those of
    the trained or replayed model, and counters stay unchanged.
    """
    spec = ModelSpec.of(model)
    sent = spec.unpack(model)
    if attack.replays:
        sent = spec.unpack(work.state.array_records[_FIRST_MODEL])
    received = spec.compared(_received(work, answer.told, spec))
    seed, size = work.client.config.seed, len(received)
    rng = np.random.default_rng([*work.entropy, 1])
    with np.errstate(over="ignore", invalid="ignore"):
        if attack.informed:
            push = unit(generator(seed, _PUSH).standard_normal(size, np.float32))
            delta = attack.against(np.stack(honest), push, rng)
        else:
            delta = attack.update(spec.compared(sent) - received, rng)
        sent[... if spec.trainable is None else spec.trainable] = received + delta
    poisoned = spec.pack(sent)
    for name, role in zip(spec.names, spec.roles, strict=True):
        if role is Role.COUNTER:
            poisoned[name] = model[name]
    return replace(answer, model=poisoned)


def _received(work: ClientWork, told: Mapping[str, object], spec: ModelSpec) -> Vector:
    """Return the model from which training started.

    Of several received models, this is the chosen one, or else their mean.
    """
    records = work.arrays
    if ARRAYS in records:
        return spec.unpack(records[ARRAYS])
    if CHOSEN in told:
        return spec.unpack(records[candidate(int(str(told[CHOSEN])))])
    mean = np.mean([spec.unpack(model) for model in work.models], axis=0)
    return np.asarray(mean, np.float32)
