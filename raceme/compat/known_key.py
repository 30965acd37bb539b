"""Whether a SuperLink knows a key, which it does not say to a device that it keeps waiting."""

from __future__ import annotations

import grpc
from flwr.client.grpc_rere_client.node_auth_client_interceptor import NodeAuthClientInterceptor
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.interceptors import RuntimeVersionClientInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from raceme.compat.fleet import Endpoint, Keys, open_channel

_QUESTION_SECONDS = 5.0
_KNOWS = {
    int(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED): False,
    int(ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL): True,
}


def knows_key(endpoint: Endpoint, keys: Keys) -> bool | None:
    """Return whether a SuperLink knows a key, whoever is online with it; None if it does not say.

    To a node that cannot go online it does not say why. A request that could never be granted it
    refuses for that reason only if it knows the key.
    """
    request = ActivateNodeRequest(public_key=public_key_to_bytes(keys[1]), heartbeat_interval=-1.0)
    channel = signed_channel(endpoint, keys)
    try:
        FleetStub(channel).ActivateNode(request, timeout=_QUESTION_SECONDS)
    except grpc.RpcError as error:
        stated = FlowerError.from_json(str(error.details()))
        return None if stated is None else _KNOWS.get(int(stated.code))
    finally:
        channel.close()
    return None


def signed_channel(endpoint: Endpoint, keys: Keys) -> grpc.Channel:
    """Open a channel on which every call is signed."""
    versions = RuntimeVersionClientInterceptor(component_name="SuperNode")
    return grpc.intercept_channel(
        open_channel(endpoint), versions, NodeAuthClientInterceptor(*keys)
    )
