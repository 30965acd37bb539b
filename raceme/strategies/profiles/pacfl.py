"""PACFL: clusters by principal angles between clients' raw data, before training.

Vahidian et al., "Efficient Distribution Similarity Identification in Clustered Federated Learning
via Principal Angles Between Client Data Subspaces", AAAI 2023 (arXiv 2209.10526). Before training
every client sends U_i once: the first p left singular vectors of the flattened samples of each
class. The distance of two clients is the smallest entry of arccos(U_iᵀ U_j), in degrees; the
nearest clusters are merged up to a distance of β; each cluster then trains by federated averaging.
For a newcomer all clients are clustered again, and it continues from its cluster's model.

**U_i are directions of raw data**: those of images resemble the client's mean images. Do not use
the method where these must not leave the client.

Average linkage is the unweighted mean of two rows, as in the authors' code. Our readings: singular
vectors point towards the mean of their class's samples, since the smallest angle depends on their
sign; ``directions-in-all`` gives each class its share, rounded, at least one. The paper's other
measure, the trace, is not confirmed and left out. β depends on the data; a run logs the angles.
``clusters`` is our addition. The server stores U_i of each client and the n² angles. On virtual
time U_i cost a pass without gradients (our addition).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from logging import getLogger

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster
from scipy.cluster.hierarchy import linkage as joined_by
from scipy.spatial.distance import squareform

from raceme.core.clusters import parts_of
from raceme.core.messages import COMPUTE_SCALE, forward_cost
from raceme.core.options import option
from raceme.core.requests import Answer, InvalidReplyError, Request
from raceme.core.scheduling import InRounds, RoundsParameters, SelectionContext
from raceme.core.strategy import Needs
from raceme.strategies.profiles import IN_ALL, PER_CLASS, PRINCIPAL_DIRECTIONS
from raceme.strategies.shared import QueriesFirst, QueryState, drop_unusual, numbered, regroup

log = getLogger("raceme")

_ROUNDING = 1e-3
_MOST = 10_000_000
"""Maximum size of a client's directions."""
_LINKAGES = {"average": "weighted", "maximum": "complete", "minimum": "single"}
"""The paper's names, and scipy's: "weighted" is the mean of two rows whatever their sizes."""


@dataclass(frozen=True)
class PACFLParameters(RoundsParameters):
    """Hyper-parameters of PACFL; the defaults are the authors' for CIFAR-10 with two labels."""

    directions: int = option(3, "p: main directions of each class", low=1, high=10_000)
    directions_in_all: int = option(
        0,
        "a client's directions in total, divided by the classes' shares (0: p of each class)",
        low=0,
        high=10_000,
    )
    beta: float = option(4.9, "β: angle in degrees up to which clusters are joined", low=0)
    clusters: int = option(0, "number of clusters, instead of β (0: by β; our addition)", low=0)
    linkage: str = option(
        "average", "angle of two clusters: average, maximum or minimum", among=tuple(_LINKAGES)
    )


@dataclass
class PACFLState(QueryState):
    """State of PACFL besides its clusters.

    Attributes
    ----------
    directions : dict[str, NDArray[np.float32]]
        U_i of each client that has answered. Shape (sample size, directions).
    angles : dict[str, dict[str, float]]
        A: angle of each pair in degrees, by the later client and then the earlier one.
    is_new : bool
        Whether a client has answered since the last clustering.
    is_clustered : bool
        Whether the clients have been clustered.
    """

    directions: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    angles: dict[str, dict[str, float]] = field(default_factory=dict)
    is_new: bool = False
    is_clustered: bool = False


class PACFL(QueriesFirst):
    """Clustering before training by principal angles between clients' data subspaces (PACFL)."""

    parameters_type = PACFLParameters
    state_type = PACFLState
    needs = Needs(kinds=frozenset({PRINCIPAL_DIRECTIONS}), settings=frozenset({PER_CLASS, IN_ALL}))
    parameters: PACFLParameters
    state: PACFLState
    scheduling: InRounds

    # Before the first round, and for newcomers: directions.

    def _queries(self, context: SelectionContext) -> Sequence[Request] | None:
        """Query clients without directions, and cluster if there are new ones."""
        asked = self.scheduling.ask_first(context, self._should_answer, every=0)
        if asked is not None:
            return [self._question(client) for client in asked]
        if self.state.is_new and not (self.scheduling.state.running or context.greeting):
            self._cluster()
        return None

    def _should_answer(self, client: str) -> bool:
        return client not in self.state.directions and self._has_tries(client)

    def _question(self, client: str) -> Request:
        """Return a query for the principal directions of a client's data."""
        options, examples = self.parameters, self.progress.fleet.clients[client].num_examples
        settings = {
            PER_CLASS: options.directions,
            IN_ALL: options.directions_in_all,
            COMPUTE_SCALE: forward_cost(self.train_config, examples),
        }
        return Request(client, PRINCIPAL_DIRECTIONS, models=(), settings=settings)

    def on_answer(self, answer: Answer) -> None:
        """Store a client's directions.

        Raises
        ------
        InvalidReplyError
            They are not columns of length 1.
        """
        state, client = self.state, answer.task.client
        bound = 1.0 + _ROUNDING
        stated = answer.array(PRINCIPAL_DIRECTIONS, (None, None), -bound, bound, most=_MOST)
        lengths = np.linalg.norm(stated, axis=0)
        if np.abs(lengths - 1.0).max() > _ROUNDING:
            raise InvalidReplyError("its directions are not of length 1")
        state.directions[client] = stated.astype(np.float32)
        state.is_new = True

    def _cluster(self) -> None:
        """Cluster all clients with directions; new clusters start from a copy."""
        state, options = self.state, self.parameters
        state.is_new = False
        drop_unusual(state.directions, "its samples have another size than others'")
        clients = list(state.directions)
        for position, client in enumerate(clients):
            known = state.angles.setdefault(client, {})
            for other in clients[:position]:
                if other not in known:
                    own, theirs = state.directions[client], state.directions[other]
                    known[other] = least_angle(own, theirs)
        angles = np.zeros((len(clients), len(clients)))
        for row, client in enumerate(clients):
            for column, other in enumerate(clients[:row]):
                angles[row, column] = angles[column, row] = state.angles[client][other]
        labels = agglomerated(angles, options.beta, options.linkage, options.clusters)
        if len(clients) > 1:
            _log_angles(angles, labels)
        if state.is_clustered:
            regroup(self.clusters, clients, labels)
            return
        state.is_clustered = True
        self.clusters.split(0, parts_of(clients, labels), threshold=options.beta)


def least_angle(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Return the smallest entry of arccos(U_iᵀ U_j), in degrees.

    Parameters
    ----------
    one, other : NDArray[np.float32]
        Directions of length 1, side by side. Shapes (d, p) and (d, q).
    """
    cosines = np.clip(one.T.astype(np.float64) @ other.astype(np.float64), -1.0, 1.0)
    return float(np.degrees(np.arccos(cosines.max())))


def agglomerated(
    angles: NDArray[np.float64], beta: float, how: str, clusters: int = 0
) -> NDArray[np.int64]:
    """Merge the nearest clusters up to a distance of β.

    Parameters
    ----------
    angles : NDArray[np.float64]
        A: symmetric, in degrees. Shape (n, n).
    beta : float
        β: maximum distance of merged clusters, in degrees.
    how : str
        Linkage: ``"average"``, ``"maximum"`` or ``"minimum"`` of the pairwise angles.
    clusters : int
        Number of clusters, instead of β; 0 for β.

    Returns
    -------
    NDArray[np.int64]
        Labels, numbered in order of first appearance. Shape (n,).
    """
    if len(angles) < 2:
        return np.zeros(len(angles), np.int64)
    tree = joined_by(squareform(angles, checks=False), _LINKAGES[how])
    if clusters:
        return numbered(fcluster(tree, clusters, "maxclust"))
    return numbered(fcluster(tree, beta, "distance"))


def _log_angles(angles: NDArray[np.float64], labels: NDArray[np.int64]) -> None:
    """Log the angles inside and across clusters, for the choice of β."""
    pairs = np.triu(np.ones_like(angles, bool), 1)
    same = (labels[:, None] == labels) & pairs
    apart = ~(labels[:, None] == labels) & pairs
    log.info(
        "%d clusters of %d clients; angles inside up to %.2f, across from %.2f to %.2f degrees",
        int(labels.max()) + 1,
        len(labels),
        angles[same].max(initial=0.0),
        angles[apart].min(initial=90.0),
        angles[pairs].max(),
    )
