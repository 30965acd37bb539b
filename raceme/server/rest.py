"""Whether a run on virtual time has come to rest: nothing is left that could change anything."""

from __future__ import annotations

import math

from flwr.serverapp import Grid

from raceme.protocol.timeline import Foreseeing
from raceme.server.dispatch import Dispatch
from raceme.server.fleet import Fleet
from raceme.server.steps import Steps

AT_REST = "at rest: nobody's loss rises, and no data will change"


def is_at_rest(grid: Grid, fleet: Fleet, dispatch: Dispatch, steps: Steps) -> bool:
    """Return whether no client will ever train again.

    Each is at rest as its data are now, no time is ahead at which data move on, and nobody will
    come who has never been there. Only a grid that foresees who comes can tell: real devices may
    come, and have new data, at any time.

    Parameters
    ----------
    grid : Grid
        Any Flower grid.
    fleet : Fleet
        The clients.
    dispatch : Dispatch
        Who works when.
    steps : Steps
        At which step clients' data are, and when time moves them on.
    """
    # Asked after every update: most policies say no of the first client.
    if not all(dispatch.at_rest(client, steps.now_of(client)) for client in fleet.by_node.values()):
        return False
    if not fleet.by_node or not isinstance(grid, Foreseeing) or steps.next_time() < math.inf:
        return False
    # Some may be there that have not been greeted, or have not answered yet.
    if not fleet.by_node.keys() | fleet.refused.keys() >= set(grid.get_node_ids()):
        return False
    ahead = grid.arrivals_ahead()
    # Who will be back may be any of those that are away.
    away = [name for name, client in fleet.clients.items() if ahead and client.node_id is None]
    return all(ahead.values()) and all(
        dispatch.at_rest(client, steps.now_of(client)) for client in away
    )
