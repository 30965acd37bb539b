"""What each client uses, for those who want the models that accuracies were measured with."""

from __future__ import annotations

from collections.abc import Iterator

from raceme.clustering.clusters import blended
from raceme.protocol.messages import Vector
from raceme.server.interface import Questions


def models_in_use(method: Questions) -> Iterator[tuple[str, Vector]]:
    """Yield the clients that are online, and the model that each would be tested with now.

    That is its cluster's, of several clusters Σ_k α_k w_k, or one that the method has for it alone.
    One model at a time is made: a fleet's may be more than fits into memory.

    Parameters
    ----------
    method : Questions
        A method that has run.

    Yields
    ------
    tuple[str, Vector]
        A client, and its model's weights, shape (d,).
    """
    clients = [client.client_id for client in method.progress.fleet.online()]
    alone = set()
    for client, vector in method.used(clients):
        alone.add(client)
        yield client, vector
    served = method.served
    for client in clients:
        if client not in alone:
            yield client, blended(served, method.placement(client))
