"""Work on its way out: the message that gives a client its work, and the task that is kept."""

from __future__ import annotations

from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from raceme.protocol import messages as names
from raceme.server.interface import Questions
from raceme.server.packing import Packer
from raceme.server.steps import Steps
from raceme.server.work import Task, Work

_MESSAGE_TYPES = {
    names.EVALUATE: MessageType.EVALUATE,
    names.LABEL_COUNTS: MessageType.QUERY,
}
"""Flower's type of the messages of a kind of work; all others take a device's time: training."""


class Outgoing:
    """Makes messages of work.

    Parameters
    ----------
    method : Questions
        Whose work it is.
    packer : Packer
        Makes records of models.
    steps : Steps
        Knows at which step clients' data are.
    train_config : ConfigRecord
        The run's settings for local training.
    ttl : float
        Time to live of the messages, in seconds.
    """

    def __init__(
        self,
        method: Questions,
        packer: Packer,
        steps: Steps,
        train_config: ConfigRecord,
        ttl: float,
    ) -> None:
        self._method, self._packer, self._steps = method, packer, steps
        self._train_config, self._ttl = train_config, ttl

    def message(self, work: Work, now: float) -> tuple[Message, Task]:
        """Make the message of some work, with what its reply has to echo, and number the task.

        Raises
        ------
        ValueError
            The client is away: a mistake of the method's.
        """
        method, progress = self._method, self._method.progress
        client = progress.fleet.clients[work.client]
        if client.node_id is None:
            raise ValueError(f"{type(method).__name__} has work for '{work.client}', who is away")
        records, size, versions = self._models(work)
        main = method.clusters.main(work.client)
        cluster = next(iter(versions)) if len(versions) == 1 else main
        step = self._steps.of(work.client)
        size += sum(record.count_bytes() for record in work.arrays.values())
        task = Task(
            number=progress.tasks,
            client=work.client,
            cluster=cluster,
            version=method.models[cluster].version,
            updates=progress.updates,
            sent_at=now,
            bytes_down=0 if work.is_held else size,
            candidates=versions,
            kind=work.kind,
            step=step or 0,
            phase=work.phase or work.kind,
        )
        progress.tasks += 1
        policy = method.dispatch.settings(work)
        settings: dict[str, Any] = {**self._train_config, **policy, **work.settings}
        if names.ROUND not in settings:
            settings |= {names.TASK: task.number, names.VERSION: task.version}
        if work.kind != names.TRAIN:
            settings[names.KIND] = work.kind
        if step is not None:
            settings[names.STEP] = step
        former = progress.trained_steps.get(work.client) if method.exchanges else None
        if settings.get(names.SCORED) and former is not None:
            settings[names.FORMER_STEP] = former
        content = RecordDict({**records, **work.arrays, names.CONFIG: ConfigRecord(settings)})
        kind = _MESSAGE_TYPES.get(work.kind, MessageType.TRAIN)
        return Message(content, client.node_id, kind, ttl=self._ttl), task

    def _models(self, work: Work) -> tuple[dict[str, ArrayRecord], int, dict[int, int]]:
        """Return the models that travel, their size, and the versions of named ones by cluster."""
        models = self._method.models
        if work.models is None:
            weights = self._method.placement(work.client)
            record, size = self._packer.serve(models, weights)
            return {names.ARRAYS: record}, size, {}
        versions = {cluster: models[cluster].version for cluster in work.models}
        records, size = self._packer.pack_some(models, work.models, work.kind != names.TRAIN)
        return records, size, versions
