"""Models as they travel: packed once per version, however many clients receive them."""

from __future__ import annotations

from collections.abc import Mapping

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from raceme.compat import array_record
from raceme.messages import ARRAYS, CONFIG, TASK, VERSION, ModelSpec, candidate
from raceme.strategies.model import Model
from raceme.strategies.replies import Task

Value = str | int | float | bool


class Packer:
    """Turns models into records, and keeps the record of each cluster's present version.

    Parameters
    ----------
    spec : ModelSpec
        What a model looks like.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._packed: dict[int, tuple[int, ArrayRecord, int]] = {}

    def pack(self, cluster: int, model: Model) -> tuple[ArrayRecord, int]:
        """Return a cluster's model as a record, and its size in bytes."""
        packed = self._packed.get(cluster)
        if packed is None or packed[0] != model.version:
            record = self._spec.pack(model.vector)
            packed = self._packed[cluster] = (model.version, record, record.count_bytes())
        return packed[1], packed[2]

    def pack_some(
        self, models: Mapping[int, Model], clusters: tuple[int, ...]
    ) -> tuple[dict[str, ArrayRecord], int]:
        """Return the models that a client is sent, by the names of their records, and their size.

        One model is to be trained; of several the client chooses one.
        """
        packed = [self.pack(cluster, models[cluster]) for cluster in clusters]
        if len(packed) == 1:
            return {ARRAYS: packed[0][0]}, packed[0][1]
        records = {candidate(index): record for index, (record, _) in enumerate(packed)}
        return records, sum(size for _, size in packed)

    def pack_all(self, models: Mapping[int, Model]) -> ArrayRecord:
        """Return all models as one record: the model itself, or one prefix per cluster."""
        packed = {cluster: self.pack(cluster, model)[0] for cluster, model in models.items()}
        if len(packed) == 1:
            return next(iter(packed.values()))
        return array_record(
            {
                f"{cluster}/{name}": array
                for cluster, record in packed.items()
                for name, array in record.items()
            }
        )


def training_message(
    task: Task,
    node_id: int,
    arrays: Mapping[str, ArrayRecord],
    settings: Mapping[str, Value],
    ttl: float,
) -> Message:
    """Make the message that gives a client its task, with what its reply has to echo.

    Parameters
    ----------
    task : Task
        The work.
    node_id : int
        Where the client is.
    arrays : Mapping[str, ArrayRecord]
        The model to train, or several, and what travels with it, by the name of the record.
    settings : Mapping[str, Value]
        How to train it.
    ttl : float
        Time to live of the message, in seconds.
    """
    config = ConfigRecord({**settings, TASK: task.number, VERSION: task.version})
    content = RecordDict({**arrays, CONFIG: config})
    return Message(content, node_id, MessageType.TRAIN, ttl=ttl)
