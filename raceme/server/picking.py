"""Who of the online clients takes part in a round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raceme.server.fleet import Client

RANDOM, IN_TURN = "random", "in-turn"


def sample(online: Sequence[Client], count: int, rng: np.random.Generator) -> Sequence[Client]:
    """Draw clients, at least one, in order of greeting."""
    if count >= len(online):
        return online
    drawn = rng.permutation(len(online))[: max(1, count)]
    return [online[index] for index in sorted(drawn)]


def in_turn(
    online: Sequence[Client], count: int, picked: dict[str, bool], rng: np.random.Generator
) -> Sequence[Client]:
    """Pick clients that have never been picked, in order of greeting; draw only what is missing.

    What FlexCFL's published code does for all its methods. A newcomer is picked before any other
    client is picked again, and a client that is offline when its turn comes, once it is back.

    Parameters
    ----------
    online : Sequence[Client]
        In order of greeting.
    count : int
        How many to pick; at least one is.
    picked : dict[str, bool]
        Clients that have been picked before; those picked now are added.
    rng : numpy.random.Generator
        Draws the others, once all who are online have had their turn.
    """
    first = [client for client in online if client.client_id not in picked][: max(1, count)]
    names = {client.client_id for client in first}
    others = [client for client in online if client.client_id not in names]
    if not first or count > len(first):
        names |= {client.client_id for client in sample(others, count - len(first), rng)}
    picked.update(dict.fromkeys((client.client_id for client in first), True))
    return [client for client in online if client.client_id in names]
