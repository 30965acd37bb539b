"""Models as they travel: packed once per version, however many clients receive them.

Simulated clients hold the versions that they train from in the memory of this process. Those that
are too many for it wait in a file.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from flwr.app import ArrayRecord

from raceme.clustering.clusters import Weights, blended
from raceme.clustering.model import Model
from raceme.compat.parked import park
from raceme.compat.spill import BUDGET, Spill
from raceme.protocol.messages import ARRAYS, ModelSpec, candidate


class Packer:
    """Turns models into records, and keeps the record of each cluster's present version.

    Parameters
    ----------
    spec : ModelSpec
        What a model looks like.
    budget : int
        Bytes of former versions in memory at most.
    """

    def __init__(self, spec: ModelSpec, budget: int = BUDGET) -> None:
        self._spec, self._spill = spec, Spill(budget)
        self._packed: dict[int, tuple[Model, int, ArrayRecord, int]] = {}

    def pack(self, cluster: int, model: Model) -> tuple[ArrayRecord, int]:
        """Return a cluster's model as a record, and its size in bytes."""
        if not self._has(cluster, model):
            self._drop(cluster)
            record = self._spec.pack(model.vector)
            self._packed[cluster] = (model, model.version, record, record.count_bytes())
        _, _, record, size = self._packed[cluster]
        return record, size

    def _has(self, cluster: int, model: Model) -> bool:
        """Return whether the record of a cluster is that of its present version."""
        packed = self._packed.get(cluster)
        return packed is not None and packed[0] is model and packed[1] == model.version

    def serve(self, models: Mapping[int, Model], weights: Weights) -> tuple[ArrayRecord, int]:
        """Return the model that serves a client of these clusters, and its size in bytes."""
        if len(weights) == 1:
            cluster = next(iter(weights))
            return self.pack(cluster, models[cluster])
        record = self._spec.pack(blended(models, weights))
        return record, record.count_bytes()

    def pack_some(
        self, models: Mapping[int, Model], clusters: tuple[int, ...], numbered: bool
    ) -> tuple[dict[str, ArrayRecord], int]:
        """Return the models that a client is sent, by the names of their records, and their size.

        A model to be trained is called ``arrays``; those of other work are numbered.
        """
        packed = [self.pack(cluster, models[cluster]) for cluster in clusters]
        if len(packed) == 1 and not numbered:
            return {ARRAYS: packed[0][0]}, packed[0][1]
        records = {candidate(index): record for index, (record, _) in enumerate(packed)}
        return records, sum(size for _, size in packed)

    def keep_only(self, models: Mapping[int, Model]) -> None:
        """Forget the records of clusters that do not exist any more."""
        # Asked after every update: looked at only when there are records too many.
        if len(self._packed) > len(models):
            for cluster in self._packed.keys() - models.keys():
                self._drop(cluster)

    def _drop(self, cluster: int) -> None:
        """Forget a record; what clients still have of it may have to leave the memory."""
        if cluster in self._packed:
            _, _, record, _ = self._packed.pop(cluster)
            arrays = [weakref.ref(array) for array in record.values()]
            del record
            park(arrays, self._spill)
