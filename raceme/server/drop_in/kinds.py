"""What to say where a ClientApp does not do what a method asks for."""

from __future__ import annotations

from collections.abc import Collection

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from raceme.config.errors import UserError
from raceme.protocol.timeline import Timeline

NOT_REGISTERED = "function registered"
"""What Flower's ClientApp says where the user has written no function for a type of message."""
SNIPPET = """
    from raceme.client_app import AddedKinds, OwnData

    def load(context):
        x_train, y_train, x_test, y_test = ...  # this client's samples, as arrays
        return OwnData(Net(), x_train, y_train, x_test, y_test)

    kinds = AddedKinds(load)
    app = ClientApp(mods=[kinds])
    app.query()(kinds.answer)
"""
"""What a user adds to a ClientApp."""


def check_kinds(
    grid: Grid, clock: Timeline, method: str, needs: Collection[str], patience: float
) -> None:
    """Ask one client who it is, as Raceme's ClientApp can say, before all others are asked.

    Parameters
    ----------
    grid : Grid
        Where the clients are; one at least is connected.
    clock : Timeline
        Its clock.
    method : str
        Name of the method.
    needs : Collection[str]
        Kinds of work that it asks for.
    patience : float
        Seconds for which the answer is waited for; without one the run begins all the same.

    Raises
    ------
    UserError
        The ClientApp has no function for queries, and so none for these kinds of work.
    """
    node = next(iter(grid.get_node_ids()))
    greeting = Message(RecordDict(), node, MessageType.QUERY, ttl=patience)
    asked, until = list(grid.push_messages([greeting])), clock.now() + patience
    while clock.now() < until:
        if replies := clock.wait(asked, until):
            reply = replies[0]
            if reply.has_error() and NOT_REGISTERED in (reply.error.reason or ""):
                raise missing_kinds(method, needs)
            return


def missing_kinds(method: str, needs: Collection[str]) -> UserError:
    """Return the error for a ClientApp that does not do the kinds of work that a method needs."""
    listed = " and ".join(f"'{kind}'" for kind in sorted(needs))
    kinds = "a kind" if len(needs) == 1 else "kinds"
    return UserError(
        f"{method} asks clients for more than to train and to test a model: {listed}. This "
        f"ClientApp has no function for such {kinds} of work. Take a method that needs none, such "
        "as CASA (docs/flower-users.md lists them), or add to the ClientApp:",
        SNIPPET,
    )
