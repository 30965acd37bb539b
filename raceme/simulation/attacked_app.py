"""The ClientApp of a simulation in which some clients attack: all others answer as ever."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from zlib import crc32

import numpy as np
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from raceme import client_app
from raceme.protection.attacks import Attack, attack_of, attackers_of
from raceme.protocol.messages import ARRAYS, CHOSEN, TASK, ModelSpec, Role, Vector, candidate
from raceme.training.clients import Client
from raceme.training.work import Answer, ClientWork

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Do work that takes a device's time."""
    return _respond(message, context, client_app.train)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test a model: attackers, too, tell how well they are served."""
    return _respond(message, context, client_app.evaluate)


@app.query()
def query(message: Message, context: Context) -> Message:
    """Say who this client is, or what else is asked for."""
    return _respond(message, context, client_app.query)


def _respond(
    message: Message, context: Context, honestly: Callable[[Message, Context], Message]
) -> Message:
    work = client_app.work_of(message, context)
    if int(context.node_config["partition-id"]) not in attackers_of(work.client.config):
        return honestly(message, context)
    attack = attack_of(work.client.config)
    work = _poisoned_work(work, attack)
    answer = client_app.KINDS[work.kind](work)
    if answer.model is not None:
        answer = _poisoned_answer(work, answer, answer.model, attack)
    return client_app.reply_to(message, work, answer)


def _poisoned_work(work: ClientWork, attack: Attack) -> ClientWork:
    """Return the work on the labels that an attacker trains on; it is tested on the true ones."""

    def poisoned(client: Client) -> Client:
        parts = {
            name: samples.with_labels(attack.labels(samples.y.numpy(), client.num_classes))
            for name in ("train", "validation")
            if (samples := getattr(client, name)) is not None
        }
        return replace(client, **parts, _divided={})

    return replace(
        work,
        client=poisoned(work.client),
        at_step=lambda step: poisoned(work.at_step(step)),
        steps=tuple(map(poisoned, work.steps)),
    )


def _poisoned_answer(
    work: ClientWork, answer: Answer, model: ArrayRecord, attack: Attack
) -> Answer:
    """Return an answer whose model is what an attacker sends; counters stay as they are."""
    spec = ModelSpec.of(model)
    trained, received = spec.unpack(model), _received(work, answer.told, spec)
    rng = np.random.default_rng(
        [work.client.config.seed, crc32(work.client.id.encode()), int(work.number(TASK, 0)), 1]
    )
    with np.errstate(over="ignore", invalid="ignore"):
        sent = received + attack.update(np.asarray(trained - received), rng)
    poisoned = spec.pack(sent.astype(np.float32))
    for name, role in zip(spec.names, spec.roles, strict=True):
        if role is Role.COUNTER:
            poisoned[name] = model[name]
    return replace(answer, model=poisoned)


def _received(work: ClientWork, told: Mapping[str, object], spec: ModelSpec) -> Vector:
    """Return the model that was trained: of several the chosen one, or else their mean."""
    records = work.arrays
    if ARRAYS in records:
        return spec.unpack(records[ARRAYS])
    if CHOSEN in told:
        return spec.unpack(records[candidate(int(str(told[CHOSEN])))])
    mean = np.mean([spec.unpack(model) for model in work.models], axis=0)
    return np.asarray(mean, np.float32)
