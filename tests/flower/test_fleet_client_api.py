"""Properties of Flower's Fleet API on which devices and key bindings rely."""

from __future__ import annotations

import grpc
import pytest
from fleet_api import FleetApi, fleet_api
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, RegisterNodeFleetRequest
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from raceme.core.signals import StopSignal
from raceme.fleet.device import NotAcceptedError, PatientCalls
from raceme.flower import fleet_client as fleet
from raceme.flower.fleet_client import knows_key, signed_channel
from raceme.flower.fleet_protocol import Keys, generate_keys


def stub(api: FleetApi, keys: Keys) -> FleetStub:
    """Make calls that are signed with the given keys."""
    return FleetStub(signed_channel(api.endpoint, keys))


def test_a_superlink_says_whether_it_knows_a_key_without_anybody_going_online() -> None:
    keys, other = generate_keys(), generate_keys()
    with fleet_api() as api:
        assert knows_key(api.endpoint, keys) is False
        api.register(keys)
        assert knows_key(api.endpoint, keys) is True
        assert knows_key(api.endpoint, other) is False
        calls = PatientCalls(StopSignal(), api.endpoint)
        with fleet.connect(api.endpoint, keys, calls, register=False):
            # Another process with the same key is refused, but learns that the key is known.
            second = fleet.connect(api.endpoint, keys, calls, register=False)
            with pytest.raises(NotAcceptedError), second:
                pass
            assert knows_key(api.endpoint, keys) is True
    assert knows_key(api.endpoint, keys) is None


@pytest.mark.parametrize("registered_only", [True, False])
def test_nobody_acts_for_a_node_without_its_private_key(registered_only: bool) -> None:
    owner, thief = generate_keys(), generate_keys()
    with fleet_api(registered_only) as api:
        node = api.register(owner)
        api.register(thief)
        request = ActivateNodeRequest(public_key=public_key_to_bytes(owner[1]))
        request.heartbeat_interval = 30
        stub(api, owner).ActivateNode(request)
        wanted = PullMessagesRequest(node=Node(node_id=node))
        stub(api, owner).PullMessages(wanted)
        with pytest.raises(grpc.RpcError, match="Invalid node ID"):
            stub(api, thief).PullMessages(wanted)


def test_a_public_key_alone_makes_no_node_that_could_be_used() -> None:
    owner, thief = generate_keys(), generate_keys()
    stolen = public_key_to_bytes(owner[1])
    with fleet_api(registered_only=False) as api:
        node = stub(api, thief).RegisterNode(RegisterNodeFleetRequest(public_key=stolen))
        wanted = PullMessagesRequest(node=Node(node_id=node.node_id))
        with pytest.raises(grpc.RpcError, match="Invalid node ID"):
            stub(api, thief).PullMessages(wanted)
