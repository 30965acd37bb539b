"""Small real ClientApps and fleets for tests that need no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from raceme.core.messages import from_array, to_array
from raceme.simulation import Device, Node, VirtualGrid
from raceme.simulation.devices import CostFunction, training_cost

MODEL = ArrayRecord({"w": Array(np.zeros(4, np.float32)), "b": Array(np.zeros((2, 2), np.float32))})
"""An initial model of eight zeros in two arrays."""


Change = Callable[[Message, int], Message]
"""Changes a client's reply to a training message; the number is the client's partition."""


def pulled_app(
    targets: Sequence[np.ndarray] | None = None,
    step: float = 0.5,
    change: Change | None = None,
    test_examples: Sequence[int] | None = None,
) -> ClientApp:
    """An app whose clients move the model a step towards their own targets.

    The accuracy is 1 at the target and decreases with the distance; without targets a client echoes
    the model. A client reports five test examples, or the given number. Of several models it trains
    the one nearest to its target, and with a mask only the unmasked weights. Scores do not depend
    on the step of the data; when several steps are tested at once, the accuracy halves with each
    step. `change` may spoil the replies to training messages.
    """
    app = ClientApp()

    def target(context: Context) -> np.ndarray | None:
        return None if targets is None else targets[int(context.node_config["partition-id"])]

    @app.query()
    def query(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        group = int(context.node_config.get("group", -1))
        metrics = MetricRecord({"num-examples": 10 + partition, "group": group})
        identity = ConfigRecord({"client-id": f"c{partition}"})
        return Message(RecordDict({"metrics": metrics, "config": identity}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        wanted = target(context)
        kind = message.content["config"].get("kind")
        if kind in ("scores", "losses"):
            samples = 8 if kind == "losses" else 1
            return Message(scores_of(message.content, wanted, samples), reply_to=message)
        if kind in STATISTICS:
            numbers = STATISTICS[kind](message.content, wanted)
            return Message(stated(message.content, **numbers), reply_to=message)
        mixed = kind == "train-mixed"
        flat, chosen = received(message.content, wanted)
        if wanted is not None:
            moved = flat + np.float32(step) * (wanted.astype(np.float32) - flat)
            mask = message.content.array_records.get("mask")
            flat = moved if mask is None else np.where(read(mask), moved, flat)
        config = message.content["config"]
        echo = echo_of(config)
        if chosen is not None:
            echo["chosen"] = chosen
        metrics = MetricRecord(
            {"num-examples": 10 + int(context.node_config["partition-id"]), "train-loss": 0.5}
        )
        records = {"arrays": write(flat), "metrics": metrics, "config": echo}
        if mixed and chosen is not None:
            shares = np.full(len(several_of(message.content)), 0.1)
            shares[chosen] = 1.0 - shares.sum() + 0.1
            records["numbers"] = ArrayRecord({"shares": Array(shares)})
        reply = Message(RecordDict(records), reply_to=message)
        return change(reply, int(context.node_config["partition-id"])) if change else reply

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        if message.content["config"].get("kind") == "test-steps":
            return Message(tests_of(message.content, target(context)), reply_to=message)
        flat, wanted = read(message.content["arrays"]), target(context)
        distance = 0.0 if wanted is None else float(np.linalg.norm(flat - wanted))
        partition = int(context.node_config["partition-id"])
        examples = test_examples[partition] if test_examples else 5
        metrics = MetricRecord(
            {"accuracy": 1 / (1 + distance), "loss": distance, "num-examples": examples}
        )
        echo = echo_of(message.content["config"])
        return Message(RecordDict({"metrics": metrics, "config": echo}), reply_to=message)

    return app


def scores_of(content: RecordDict, wanted: np.ndarray | None, samples: int = 1) -> RecordDict:
    """Return accuracies and losses of the received models, for each requested step.

    If losses of samples are requested, all samples have the same loss.
    """
    config = content["config"]
    several = several_of(content)
    far = [0.0 if wanted is None else float(np.linalg.norm(flat - wanted)) for flat in several]
    losses = np.tile(np.array(far, np.float32)[:, None], samples * len(config.get("steps", [0])))
    accuracies = np.asarray(1 / (1 + losses), np.float32)
    numbers = ArrayRecord({"accuracies": Array(accuracies), "losses": Array(losses)})
    metrics = MetricRecord({"num-examples": 10})
    return RecordDict({"numbers": numbers, "metrics": metrics, "config": echo_of(config)})


def stated(content: RecordDict, **numbers: np.ndarray | float) -> RecordDict:
    """Return a reply with a client's statistics of its data, for ten examples."""
    metrics, arrays = {"num-examples": 10}, {}
    for name, value in numbers.items():
        (metrics if isinstance(value, float) else arrays)[name.replace("_", "-")] = value
    records = {"metrics": MetricRecord(metrics), "config": echo_of(content["config"])}
    if arrays:
        packed = {name: Array(value) for name, value in arrays.items()}
        records["numbers"] = ArrayRecord(packed)
    return RecordDict(records)


def wanted_or_zeros(wanted: np.ndarray | None) -> np.ndarray:
    return np.zeros(8, np.float32) if wanted is None else wanted.astype(np.float32)


def directions_of(content: RecordDict, wanted: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return a client's target as the only direction of its data."""
    flat = wanted_or_zeros(wanted) + np.float32(1e-3)
    return {"principal_directions": (flat / np.linalg.norm(flat))[:, None]}


def latent_of(content: RecordDict, wanted: np.ndarray | None) -> dict[str, float]:
    """Return the largest number of a client's target."""
    return {"latent_most": float(wanted_or_zeros(wanted).max())}


def descriptors_of(content: RecordDict, wanted: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return a client's target as the means of its features, of all and of its single class."""
    described = np.zeros((2, 2, content["config"]["latent-dimensions"]), np.float32)
    described[:, 0, :8] = wanted_or_zeros(wanted)
    return {"descriptors": described}


def gradient_of(content: RecordDict, wanted: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return the gradient of a client's distance to its target."""
    return {"gradient": received(content, wanted)[0] - wanted_or_zeros(wanted)}


def masses_of(content: RecordDict, wanted: np.ndarray | None) -> dict[str, np.ndarray]:
    """Divide a client's ten samples of two classes among models, by distance to its target."""
    far = [float(np.linalg.norm(flat - wanted_or_zeros(wanted))) for flat in several_of(content)]
    shares = np.exp(-np.array(far)) / np.exp(-np.array(far)).sum()
    return {"label_masses": shares[:, None] * np.array([4.0, 6.0])}


STATISTICS = {
    "principal-directions": directions_of,
    "latent-most": latent_of,
    "descriptors": descriptors_of,
    "gradient": gradient_of,
    "label-masses": masses_of,
}
"""The client's statistics of its data, by the kind of work."""


def tests_of(content: RecordDict, wanted: np.ndarray | None) -> RecordDict:
    """Return the accuracy of each test that a message requests."""
    config, several = content["config"], several_of(content)
    found = []
    for step, index in zip(config["tested-steps"], config["tested-models"], strict=True):
        far = 0.0 if wanted is None else float(np.linalg.norm(several[index] - wanted))
        found.append(0.5**step / (1 + far))
    numbers = ArrayRecord({"accuracies": Array(np.array(found))})
    metrics = MetricRecord({"num-examples": 5})
    return RecordDict({"numbers": numbers, "metrics": metrics, "config": echo_of(config)})


def echo_of(config: ConfigRecord) -> ConfigRecord:
    """Return the fields of a message that its reply repeats."""
    return ConfigRecord({key: config[key] for key in ("task", "version", "step") if key in config})


def received(content: RecordDict, wanted: np.ndarray | None) -> tuple[np.ndarray, int | None]:
    """Return the model to train, and its index if the message holds several."""
    if "arrays" in content:
        return read(content["arrays"]), None
    several = several_of(content)
    distances = [0.0 if wanted is None else np.linalg.norm(flat - wanted) for flat in several]
    chosen = int(np.argmin(distances))
    return several[chosen], chosen


def several_of(content: RecordDict) -> list[np.ndarray]:
    """Return the models of a message that holds several."""
    names = (name for name in content.array_records if name.startswith("arrays-"))
    ordered = sorted(names, key=lambda name: int(name.removeprefix("arrays-")))
    return [read(content[name]) for name in ordered]


def read(record: ArrayRecord) -> np.ndarray:
    """Return all arrays of a record as one vector."""
    return np.concatenate([from_array(array).ravel() for array in record.values()])


def write(flat: np.ndarray) -> ArrayRecord:
    """Return eight numbers in the shape of MODEL."""
    flat = flat.astype(np.float32)
    return ArrayRecord({"w": to_array(flat[:4]), "b": to_array(flat[4:].reshape(2, 2))})


def grid_of(
    app: ClientApp,
    devices: Sequence[Device],
    groups: Sequence[int] | None = None,
    seed: int = 0,
    partitions: Sequence[int] | None = None,
    cost: CostFunction = training_cost,
) -> VirtualGrid:
    """A virtual grid with a node per device, with the device's number as partition and client."""
    nodes = [
        Node(
            node_id=100 + index,
            device=device,
            config={
                "partition-id": partitions[index] if partitions else index,
                "num-partitions": len(devices),
            }
            | ({"group": groups[index]} if groups else {}),
            examples=10 + index,
        )
        for index, device in enumerate(devices)
    ]
    return VirtualGrid(app, nodes, seed=seed, cost=cost)
