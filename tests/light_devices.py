"""Light devices for a real `raceme serve`: threads that return the model that they get."""

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
_making = threading.Lock()


@dataclass
class Behaviour:
    """What devices do; may change while they are online.

    Attributes
    ----------
    think : float
        Seconds of work on a training message, more or less.
    stay : float
        Seconds online on average, until it leaves and comes back as a new node.
    accuracy : float
        What it measures of any model.
    step : float
        Length of its update in each weight; 0: it returns what it gets.
    uses : bool
        Whether an application uses the versions that it is sent.
    """

    think: float = 0.1
    stay: float = float("inf")
    accuracy: float = 0.5
    step: float = 0.0
    uses: bool = False


def reply_to(message: Message, name: str, does: Behaviour) -> Message:
    """Answer as a client would."""
    config = message.content.config_records.get("config", {})
    echo = ConfigRecord({key: config[key] for key in ECHOED if key in config})
    metrics = MetricRecord({"num-examples": 100, "train-loss": 0.5})
    if config.get(names.KIND) == names.USE:
        metrics = MetricRecord({names.USES: int(does.uses)})
        used = (names.USED_RUN, names.USED_CLUSTER, names.USED_VERSION)
        echo = ConfigRecord({key: config[key] for key in used if key in config})
        content = RecordDict({"metrics": metrics, "config": echo})
    elif config.get(names.KIND) == names.TEST_STEPS:
        tests: list[int] = list(config[names.TESTED_STEPS])
        scores = {names.ACCURACIES: Array(np.full(len(tests), does.accuracy))}
        content = RecordDict({names.NUMBERS: ArrayRecord(scores), "metrics": metrics})
    elif message.metadata.message_type == MessageType.QUERY:
        echo["client-id"] = name
        content = RecordDict({"metrics": metrics, "config": echo})
    elif message.metadata.message_type == MessageType.EVALUATE:
        metrics["accuracy"], metrics["loss"] = does.accuracy, 1.0 - does.accuracy
        content = RecordDict({"metrics": metrics, "config": echo})
    else:
        arrays = message.content.array_records["arrays"]
        if does.step:
            whole = arrays.to_numpy_ndarrays()
            noise = np.random.default_rng()
            moved = [
                (array + does.step * noise.standard_normal(array.shape)).astype(array.dtype)
                for array in whole
            ]
            arrays = ArrayRecord(dict(zip(arrays, map(Array, moved), strict=True)))
        content = RecordDict({"arrays": arrays, "metrics": metrics, "config": echo})
    return Message(content, reply_to=message)


def _be_online(link: Link, stop: StopSignal, name: str, does: Behaviour) -> None:
    """Answer messages for a while."""
    stays = random.expovariate(1 / does.stay) if does.stay < float("inf") else does.stay
    until = time.monotonic() + stays
    while not stop.is_set() and time.monotonic() < until:
        received = link.receive(LONGEST_WAIT)
        if received is None:
            stop.wait(0.0 if link.waited else 1.0)
            continue
        message = received[1]()
        if message.metadata.message_type == MessageType.TRAIN:
            stop.wait(does.think * random.uniform(0.5, 1.5))
        with _making:
            identify_process(message.metadata.run_id, link.node_id)
            reply = reply_to(message, name, does)
        with suppress(RunOverError):
            link.send(reply, 0.0)


def _be_device(
    endpoint: Endpoint,
    keys: Keys | None,
    stop: StopSignal,
    name: str,
    does: Behaviour,
    say: Callable[[str], None],
) -> None:
    while not stop.is_set():
        try:
            own = keys or generate_keys()
            with join(endpoint, own, stop, register=keys is None) as link:
                _be_online(link, stop, name, does)
        except (RejoinError, RunOverError) as error:
            say(f"{name} joins again: {error}")
        except StoppedError:
            return


@contextmanager
def online(
    endpoint: Endpoint,
    devices: dict[str, Behaviour],
    keys: dict[str, Keys] | None = None,
    say: Callable[[str], None] = print,
) -> Iterator[dict[str, StopSignal]]:
    """Let devices be online; yield what ends each of them."""
    stops = {name: StopSignal() for name in devices}
    threads = [
        threading.Thread(
            target=_be_device,
            args=(endpoint, (keys or {}).get(name), stops[name], name, does, say),
        )
        for name, does in devices.items()
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
