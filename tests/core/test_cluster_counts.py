"""Clusters count their clients, whatever happens."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raceme.core.clusters import Clusters, Model

VERBS = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "move", "split", "merge"]), st.integers(0, 7)),
    max_size=25,
)


@given(VERBS)
def test_clusters_count_their_clients(verbs: list[tuple[str, int]]) -> None:
    clusters = Clusters({0: Model(np.zeros(1, np.float32)), 1: Model(np.ones(1, np.float32))})
    for verb, number in verbs:
        names, client = list(clusters.models), f"c{number}"
        if verb == "join":
            clusters.join(client)
        elif verb == "leave" and client in clusters.members:
            clusters.leave(client)
        elif verb == "move":
            clusters.assign(client, names[number % len(names)])
        elif verb == "split":
            parent = names[number % len(names)]
            members = clusters.clients(parent, online_only=False)
            clusters.split(parent, [members[::2], members[1::2]])
        elif verb == "merge" and len(names) > 1:
            clusters.merge(names[:2])
        for cluster in clusters.models:
            assert clusters.size(cluster) == len(clusters.clients(cluster))
            everyone = clusters.clients(cluster, online_only=False)
            assert clusters.size(cluster, online_only=False) == len(everyone)
        sizes = {k: len(clusters.clients(k)) for k in clusters.models}
        assert clusters.largest() == max(sizes, key=lambda k: sizes[k])


def test_nothing_is_kept_of_clusters_that_come_and_go() -> None:
    clusters = Clusters({0: Model(np.zeros(1, np.float32))})
    clusters.join("c0")

    def sizes() -> dict[str, int]:
        return {name: len(part) for name, part in vars(clusters).items() if isinstance(part, dict)}

    before = sizes()
    for _ in range(3):
        founded = clusters.found(Model(np.zeros(1, np.float32)), ["c0"])
        clusters.assign("c0", 0)
        clusters.retire(founded)
    assert sizes() == before
