"""Flower's Fleet API in this process, without the rest of a SuperLink."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import (
    NodeAuthServerInterceptor,
)
from flwr.server.superlink.linkstate import LinkState, LinkStateFactory
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.superlink.cli.flower_superlink import _run_fleet_api_grpc_rere
from flwr.superlink.federation import NoOpFederationManager

from raceme.flower import fleet_client as fleet
from raceme.flower.fleet_protocol import Keys


class FleetApi:
    """The Fleet API of a server.

    Attributes
    ----------
    endpoint : Endpoint
        Its address.
    """

    def __init__(self, address: str, state: LinkState) -> None:
        self.endpoint = fleet.Endpoint(address, insecure=True)
        self._state = state

    def register(self, keys: Keys) -> int:
        """Register a device's key, like `flwr supernode register`; return its node."""
        return self._state.create_node("owner", "owner", public_key_to_bytes(keys[1]), 30)


@contextmanager
def fleet_api(registered_only: bool = True, address: str = "127.0.0.1:0") -> Iterator[FleetApi]:
    """Serve devices, like a SuperLink with or without `--enable-supernode-auth`."""
    store = ObjectStoreFactory()
    states = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), store)
    server = _run_fleet_api_grpc_rere(
        address=address,
        state_factory=states,
        objectstore_factory=store,
        enable_supernode_auth=registered_only,
        certificates=None,
        # A SuperLink has this interceptor with and without authentication.
        interceptors=[NodeAuthServerInterceptor(states)],
    )
    try:
        yield FleetApi(server.bound_address, states.state())
    finally:
        server.stop(None).wait()
