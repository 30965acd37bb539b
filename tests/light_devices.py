"""Light devices for a real `raceme serve`: threads that return the received model."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)

from raceme.core import messages as names
from raceme.core.signals import StopSignal
from raceme.fleet.device import RunOverError, StoppedError, join
from raceme.flower.fleet_client import Endpoint, Link, RejoinError
from raceme.flower.fleet_protocol import LONGEST_WAIT, Keys, generate_keys
from raceme.flower.messages import identify_process

ECHOED = ("task", "version", "step")
_identity_lock = threading.Lock()


@dataclass
class Behaviour:
    """Behaviour of a device, which may change while it is online.

    Attributes
    ----------
    training_seconds : float
        Approximate seconds of work on a training message.
    online_seconds : float
        Mean time until a device leaves and comes back as a new node.
    accuracy : float
        Accuracy that a device reports for every model.
    update_std : float
        Standard deviation of an update in each weight; 0: a device returns the received model.
    uses_versions : bool
        Whether an application uses the versions that it is sent.
    """

    training_seconds: float = 0.1
    online_seconds: float = float("inf")
    accuracy: float = 0.5
    update_std: float = 0.0
    uses_versions: bool = False


def reply_to(message: Message, name: str, behaviour: Behaviour) -> Message:
    """Return a client's reply to a message."""
    config = message.content.config_records.get("config", {})
    echo = ConfigRecord({key: config[key] for key in ECHOED if key in config})
    metrics = MetricRecord({"num-examples": 100, "train-loss": 0.5})
    if config.get(names.KIND) == names.USE:
        metrics = MetricRecord({names.USES: int(behaviour.uses_versions)})
        used = (names.USED_RUN, names.USED_CLUSTER, names.USED_VERSION)
        echo = ConfigRecord({key: config[key] for key in used if key in config})
        content = RecordDict({"metrics": metrics, "config": echo})
    elif config.get(names.KIND) == names.TEST_STEPS:
        tests: list[int] = list(config[names.TESTED_STEPS])
        scores = {names.ACCURACIES: Array(np.full(len(tests), behaviour.accuracy))}
        content = RecordDict({names.NUMBERS: ArrayRecord(scores), "metrics": metrics})
    elif message.metadata.message_type == MessageType.QUERY:
        echo["client-id"] = name
        content = RecordDict({"metrics": metrics, "config": echo})
    elif message.metadata.message_type == MessageType.EVALUATE:
        metrics["accuracy"], metrics["loss"] = behaviour.accuracy, 1.0 - behaviour.accuracy
        content = RecordDict({"metrics": metrics, "config": echo})
    else:
        arrays = message.content.array_records["arrays"]
        if behaviour.update_std:
            whole = arrays.to_numpy_ndarrays()
            noise = np.random.default_rng()
            moved = [
                (array + behaviour.update_std * noise.standard_normal(array.shape)).astype(
                    array.dtype
                )
                for array in whole
            ]
            arrays = ArrayRecord(dict(zip(arrays, map(Array, moved), strict=True)))
        content = RecordDict({"arrays": arrays, "metrics": metrics, "config": echo})
    return Message(content, reply_to=message)


def _answer_messages(link: Link, stop: StopSignal, name: str, behaviour: Behaviour) -> None:
    """Answer messages until the device leaves or is stopped."""
    stays = (
        random.expovariate(1 / behaviour.online_seconds)
        if behaviour.online_seconds < float("inf")
        else behaviour.online_seconds
    )
    until = time.monotonic() + stays
    while not stop.is_set() and time.monotonic() < until:
        received = link.receive(LONGEST_WAIT)
        if received is None:
            stop.wait(0.0 if link.waited else 1.0)
            continue
        message = received[1]()
        if message.metadata.message_type == MessageType.TRAIN:
            stop.wait(behaviour.training_seconds * random.uniform(0.5, 1.5))
        with _identity_lock:
            identify_process(message.metadata.run_id, link.node_id)
            reply = reply_to(message, name, behaviour)
        with suppress(RunOverError):
            link.send(reply, 0.0)


def _run_device(
    endpoint: Endpoint,
    keys: Keys | None,
    stop: StopSignal,
    name: str,
    behaviour: Behaviour,
    log: Callable[[str], None],
) -> None:
    """Join, and rejoin after each error, until stopped."""
    while not stop.is_set():
        try:
            own = keys or generate_keys()
            with join(endpoint, own, stop, register=keys is None) as link:
                _answer_messages(link, stop, name, behaviour)
        except (RejoinError, RunOverError) as error:
            log(f"{name} joins again: {error}")
        except StoppedError:
            return


@contextmanager
def online(
    endpoint: Endpoint,
    devices: dict[str, Behaviour],
    keys: dict[str, Keys] | None = None,
    log: Callable[[str], None] = print,
) -> Iterator[dict[str, StopSignal]]:
    """Keep devices online within the context; yield the signals that stop each of them."""
    stops = {name: StopSignal() for name in devices}
    threads = [
        threading.Thread(
            target=_run_device,
            args=(endpoint, (keys or {}).get(name), stops[name], name, behaviour, log),
        )
        for name, behaviour in devices.items()
    ]
    for thread in threads:
        thread.start()
    try:
        yield stops
    finally:
        for stop in stops.values():
            stop.set()
        for thread in threads:
            thread.join()
