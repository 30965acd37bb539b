"""A device's side of Flower's Fleet API, and of Raceme's additional calls."""

from __future__ import annotations

import contextlib
import json
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import grpc
import httpx
from flwr.app import Message
from flwr.common.serde import message_from_proto, message_to_proto, run_from_proto
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.fleet_pb2 import PullMessagesRequest as PullMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable import inflatable_object as inflatable
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError as ObjectPullError
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError as ObjectPushError
from flwr.supercore.inflatable.inflatable_utils import (
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.run import Run as Run
from google.protobuf.message import Message as ProtoMessage

from raceme.flower.fleet_protocol import (
    CALLS,
    FLEET_SERVICE,
    GREET,
    GREET_PATH,
    HEARTBEAT_CALL_TIMEOUT,
    HEARTBEAT_DEFAULT_INTERVAL,
    HEARTBEAT_MIN_INTERVAL,
    LARGEST,
    LARGEST_CALL,
    LATENCY,
    LONGEST_HEAD,
    LONGEST_ID,
    LONGEST_WAIT,
    MEDIA_TYPE,
    NEXT,
    SEND,
    SERVICE,
    ErrorNumber,
    Greeting,
    Keys,
    NextRequest,
    SendRequest,
    Signer,
    own_greeting,
    path_of,
    public_key_bytes,
)
from raceme.flower.messages import (
    decode,
    encode,
    joined,
    parted,
    set_message_id,
    size_of,
    split,
    without_content,
)

# -----------------------------------------------------------------------------
# A device's additional calls to `raceme serve`.
# -----------------------------------------------------------------------------


_SLACK_SECONDS = 10.0
"""Time that a request for work may take beyond its patience. Like all limits it is multiplied by
the latency of the network."""


class Direct:
    """Raceme's own calls, on behalf of one node.

    Parameters
    ----------
    channel : grpc.Channel
        Channel to the server, which signs calls.
    invoke : Callable
        Makes a call, with repetitions if necessary.
    wait_for : Callable
        Waits for the end of a call or a reason to stop; returns whether the call has ended.

    latency : float
        Longest time of a packet to the server, in seconds.

    Attributes
    ----------
    waited : bool
        Whether the last request for work waited at the server without success.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        invoke: Callable[..., Any],
        wait_for: Callable[[grpc.Future], bool],
        latency: float = LATENCY,
    ) -> None:
        self._invoke, self._slack = invoke, _SLACK_SECONDS * latency
        self._next = _interruptible(channel.unary_unary(f"/{SERVICE}/{NEXT}"), wait_for, None)
        self._send = channel.unary_unary(f"/{SERVICE}/{SEND}")
        self._have = ""
        self.waited = False

    def next(self, node_id: int, patience: float) -> tuple[Message, ObjectTree | None] | None:
        """Return the next message: complete, or its head and the tree of its objects."""
        patience = min(max(patience, 0.0), LONGEST_WAIT)
        request = NextRequest(node_id, patience, self._have).to_bytes()
        answer = self._invoke(self._next, request, timeout=patience + self._slack)
        parts = split(answer) if answer is not None else []
        self.waited = answer is not None and not parts
        if not parts:
            return None
        form, data = parts
        tree: ObjectTree | None = None
        if form == b"whole":
            message = decode(data)
        else:
            message, tree = _first_of(PullMessagesResponse.FromString(data))
        self._have = message.metadata.message_id
        return message, tree

    def send(self, node_id: int, reply: Message) -> bool:
        """Send a complete reply if it is small enough; return whether it was sent."""
        if size_of(reply) > LARGEST:
            return False
        asked = reply.metadata.reply_to_message_id
        self._invoke(self._send, SendRequest(node_id, asked, encode(reply)).to_bytes())
        return True


# -----------------------------------------------------------------------------
# A node's side of Flower's Fleet API, over gRPC or HTTP.
#
# The caller handles failures: all calls except heartbeats go through its `Calls`, and no function
# here ends the process.
# -----------------------------------------------------------------------------


_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", LARGEST_CALL),
    ("grpc.max_receive_message_length", LARGEST_CALL),
    # gRPC would otherwise share the connections of a process to one server between devices.
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC's own pauses between attempts to connect grow to two minutes, in which every call fails
    # at once; the device has its own back-off.
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5000),
]
_CONNECT_SECONDS = 20.0
"""Longest time to establish a connection: three round trips, and lost packets."""

AUTO, GRPC, HTTP = "auto", "grpc", "http"


@dataclass(frozen=True)
class Endpoint:
    """Address of a SuperLink's Fleet API, and its authority.

    Attributes
    ----------
    address : str
        ``HOST:PORT``.
    insecure : bool
        Plain text instead of TLS.
    root_certificates : bytes or None
        PEM of the certificate authority; None for the public ones that gRPC includes.
    transport : str
        ``"grpc"`` or ``"http"``; ``"auto"``: gRPC, unless the server speaks HTTP.
    latency : float
        Longest time of a packet to the server, in seconds: time limits are multiples of it.
    """

    address: str
    insecure: bool = False
    root_certificates: bytes | None = None
    transport: str = AUTO
    latency: float = LATENCY


class Calls(Protocol):
    """Makes remote calls, and decides how often and with which deadline.

    Attributes
    ----------
    leaving : bool
        The connection is being closed: calls are made once, with a short deadline.
    pull_failed : bool
        True if a request for the next message failed after it may have reached the SuperLink,
        which hands a message out only once.
    """

    leaving: bool
    pull_failed: bool

    def invoke(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `target`, with repetitions if necessary."""
        ...

    def answered(self) -> None:
        """Record that the SuperLink has answered a heartbeat."""
        ...

    def wait_for(self, call: grpc.Future) -> bool:
        """Wait for the end of a call; return whether it has come, not a reason to stop."""
        ...


class Transport(Protocol):
    """Makes a call, given its name, request and deadline in seconds; returns the response."""

    def __call__(self, name: str, request: ProtoMessage, timeout: float | None = None) -> Any:
        """Make the call."""

    def greet(self, request: bytes, timeout: float | None = None) -> bytes:
        """Greet the server."""


class _GrpcTransport:
    """Makes calls over a channel; one that waits for messages can be interrupted."""

    def __init__(self, channel: grpc.Channel, wait_for: Callable[[grpc.Future], bool]) -> None:
        self._calls: dict[str, Callable[..., Any]] = {
            name: channel.unary_unary(
                f"/{FLEET_SERVICE}/{name}",
                request_serializer=call.request.SerializeToString,
                response_deserializer=call.response.FromString,
            )
            for name, call in CALLS.items()
        }
        pull = cast(grpc.UnaryUnaryMultiCallable, self._calls[_PULL])
        self._calls[_PULL] = _interruptible(pull, wait_for, PullMessagesResponse())
        self._greet = channel.unary_unary(f"/{SERVICE}/{GREET}")

    def __call__(self, name: str, request: ProtoMessage, timeout: float | None = None) -> Any:
        return self._calls[name](request, timeout=timeout)

    def greet(self, request: bytes, timeout: float | None = None) -> bytes:
        """Greet the server."""
        return bytes(self._greet(request, timeout=timeout))


class HttpError(grpc.RpcError):  # type: ignore[misc]
    """A failed call over HTTP, described like an error of gRPC, so that both are handled alike.

    Parameters
    ----------
    code : grpc.StatusCode
        Status code that gRPC would give for the same failure.
    details : str
        Text for people, as in gRPC's errors.
    """

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        """Return the status code."""
        return self._code

    def details(self) -> str:
        """Return the message of the server or the network."""
        return self._details


_CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.UNIMPLEMENTED,
    405: grpc.StatusCode.UNIMPLEMENTED,
    409: grpc.StatusCode.ALREADY_EXISTS,
    412: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.UNAVAILABLE,
}


class _HttpTransport:
    """Makes calls over HTTP, as SuperNodes from 1.40 on do."""

    def __init__(self, endpoint: Endpoint, signer: Signer) -> None:
        verify: ssl.SSLContext | bool = not endpoint.insecure
        if endpoint.root_certificates is not None:
            verify = ssl.create_default_context(cadata=endpoint.root_certificates.decode())
        scheme = "http" if endpoint.insecure else "https"
        self._client = httpx.Client(base_url=f"{scheme}://{endpoint.address}", verify=verify)
        self._signer = signer

    def __call__(self, name: str, request: ProtoMessage, timeout: float | None = None) -> Any:
        body = self._post(path_of(name), request.SerializeToString(), timeout)
        return CALLS[name].response.FromString(body)

    def greet(self, request: bytes, timeout: float | None = None) -> bytes:
        """Greet the server."""
        return self._post(GREET_PATH, request, timeout)

    def _post(self, path: str, body: bytes, timeout: float | None) -> bytes:
        headers = {"content-type": MEDIA_TYPE, "accept": MEDIA_TYPE, "accept-encoding": "identity"}
        headers |= self._signer.headers()
        try:
            with self._client.stream(
                "POST", path, content=body, headers=headers, timeout=timeout
            ) as response:
                content = _uncompressed(response)
        except httpx.TimeoutException as error:
            raise HttpError(grpc.StatusCode.DEADLINE_EXCEEDED, str(error)) from None
        except httpx.TransportError as error:
            raise HttpError(grpc.StatusCode.UNAVAILABLE, str(error)) from None
        if response.is_error:
            code = _CODES.get(response.status_code, grpc.StatusCode.INTERNAL)
            raise HttpError(code, content[:LONGEST_HEAD].decode(errors="replace"))
        if response.headers.get("content-type", "").partition(";")[0] != MEDIA_TYPE:
            raise HttpError(grpc.StatusCode.UNIMPLEMENTED, "the answer is not from a Fleet API")
        return content

    def close(self) -> None:
        """Close all connections of the HTTP client."""
        self._client.close()


def _uncompressed(response: httpx.Response) -> bytes:
    """Return the body of an answer; refuse compression, by which a kilobyte becomes a megabyte."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise HttpError(grpc.StatusCode.UNIMPLEMENTED, "the answer is compressed")
    content = bytearray()
    for chunk in response.iter_raw():
        content += chunk
        if len(content) > LARGEST_CALL:
            raise HttpError(grpc.StatusCode.RESOURCE_EXHAUSTED, "the answer is too large")
    return bytes(content)


_PULL = "PullMessages"
ANNOUNCED_SECONDS = 30.0
"""Longest wait for the rest of a message. If its sender has died, the rest never arrives; Flower
would wait for two hours, in which the device receives nothing else."""


class RejoinError(Exception):
    """The node has to join again; the message says why."""


@dataclass
class Link:
    """An open connection on behalf of one node that is online.

    Attributes
    ----------
    server : Greeting or None
        The server's greeting, if it is Raceme's.
    """

    node_id: int
    _transport: Transport
    _calls: Calls
    _direct: Direct | None
    server: Greeting | None = None
    latency: float = LATENCY

    @property
    def waited(self) -> bool:
        """Whether the server let the device wait for work: it may be asked again at once."""
        return self._direct is not None and self._direct.waited

    def receive(self, patience: float = 0.0) -> tuple[Message, Callable[[], Message]] | None:
        """Return the next message without its content, and a function that fetches all of it.

        Parameters
        ----------
        patience : float
            Seconds to wait for it, if the server can let a device wait.

        Raises
        ------
        RejoinError
            A message may have been lost in transit. Only joining again tells a SuperLink so;
            `raceme serve` sends the message again by itself.
        """
        if self._direct is not None:
            received = self._direct.next(self.node_id, patience)
        else:
            pulled = self._invoke(_PULL, PullMessagesRequest(node=self._node))
            doubtful, self._calls.pull_failed = self._calls.pull_failed, False
            if not pulled.messages_list:
                if doubtful:
                    raise RejoinError("the network failed during a request for work")
                return None
            received = _first_of(pulled)
        if received is None:
            return None
        message, tree = received
        if tree is None:
            return message, lambda: message
        return message, partial(self._inflate, message.metadata.run_id, tree)

    def _inflate(self, run_id: int, tree: ObjectTree) -> Message:
        message = pull_and_inflate_object_from_tree(
            tree,
            make_pull_object_fn_protobuf(partial(self._invoke, "PullObject"), self._node, run_id),
            make_confirm_message_received_fn_protobuf(
                partial(self._invoke, "ConfirmMessageReceived"), self._node, run_id
            ),
            return_type=Message,
            # The server app may still be sending the announced objects.
            initial_backoff=0.05,
            max_tries_per_object=None,
            max_time=ANNOUNCED_SECONDS * self.latency,
        )
        message = parted(message)
        set_message_id(message, tree.object_id)
        return message

    def send(self, reply: Message, seconds: float) -> None:
        """Send a reply, with the time of its computation."""
        if self._direct is not None:
            if self._direct.send(self.node_id, reply):
                return
            reply = joined(reply)
        set_message_id(reply, reply.object_id)
        with inflatable.no_object_id_recompute():
            tree = inflatable.get_object_tree(reply)
            announced = PushMessagesRequest(
                node=self._node,
                messages_list=[message_to_proto(without_content(reply))],
                message_object_trees=[tree],
                clientapp_runtime_list=[seconds],
            )
            pushed = self._invoke("PushMessages", announced)
            run_id = reply.metadata.run_id
            push_objects(
                inflatable.get_all_nested_objects(reply),
                make_push_object_fn_protobuf(
                    partial(self._invoke, "PushObject"), self._node, run_id, pushed.session_id
                ),
                object_ids_to_push=set(pushed.objects_to_push),
            )

    def run(self, run_id: int) -> Run:
        """Return the SuperLink's description of a run."""
        answer = self._invoke("GetRun", GetRunRequest(node=self._node, run_id=run_id))
        return run_from_proto(answer.run)

    def bundle(self, run: Run) -> bytes:
        """Fetch the Flower App Bundle of a run."""
        request = GetFabRequest(node=self._node, hash_str=run.fab_hash, run_id=run.run_id)
        return bytes(self._invoke("GetFab", request).fab.content)

    @property
    def _node(self) -> Node:
        return Node(node_id=self.node_id)

    def _invoke(self, name: str, request: ProtoMessage) -> Any:
        return self._calls.invoke(partial(self._transport, name), request)


def _first_of(pulled: PullMessagesResponse) -> tuple[Message, ObjectTree]:
    return message_from_proto(pulled.messages_list[0]), pulled.message_object_trees[0]


_PROMISED_SECONDS = {True: HEARTBEAT_MIN_INTERVAL, False: HEARTBEAT_DEFAULT_INTERVAL}
_BEAT_SECONDS = {True: 5.0, False: 20.0}
"""Stated and actual interval of heartbeats, by whether the server is `raceme serve`. That server
takes one of Raceme's devices as offline after 14 s of silence; a SuperLink takes any node as
offline after two intervals."""


@contextlib.contextmanager
def _sending_heartbeats(beat: Callable[[], bool], seconds: float) -> Iterator[None]:
    """Send heartbeats within the context; a failed one is repeated soon."""
    stop = threading.Event()

    def keep_beating() -> None:
        pause, retry = 0.0, 1.0
        while not stop.wait(pause):
            begun = time.monotonic()
            if beat():
                # Over a slow network a heartbeat may take longer than the interval.
                wished, retry = seconds * random.uniform(0.8, 1.0), 1.0
                pause = max(0.0, wished - (time.monotonic() - begun))
            else:
                pause, retry = retry, min(2 * retry, seconds)

    thread = threading.Thread(target=keep_beating, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _beat(transport: Transport, node: Node, interval: float, timeout: float, calls: Calls) -> bool:
    """Send a heartbeat; return whether it arrived. The main thread handles other errors."""
    request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=interval)
    try:
        response = transport("SendNodeHeartbeat", request, timeout)
    except grpc.RpcError:
        return False
    if response.success:
        calls.answered()
    return bool(response.success)


def _interruptible(
    method: grpc.UnaryUnaryMultiCallable, wait_for: Callable[[grpc.Future], bool], instead: Any
) -> Callable[..., Any]:
    """Return a call that a stop can interrupt; it then returns `instead`."""

    def call(request: Any, timeout: float | None = None) -> Any:
        made = method.future(request, timeout=timeout)
        return made.result() if wait_for(made) else instead

    return call


class _SigningInterceptor(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """Signs the calls of a channel."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], details: Any, request: Any
    ) -> Any:
        signed = [*(details.metadata or []), *self._signer.metadata()]
        return continuation(details._replace(metadata=signed), request)


@contextlib.contextmanager
def connect(
    endpoint: Endpoint, keys: Keys, calls: Calls, *, register: bool, device: str = ""
) -> Iterator[Link]:
    """Join a SuperLink within the context; at its end the node goes offline.

    Parameters
    ----------
    endpoint : Endpoint
        Address of the SuperLink, and the certificates that identify it.
    keys : Keys
        Keys of the node; a key pair stands for one node.
    calls : Calls
        Makes the calls, from several threads.
    register : bool
        Whether to register the node first, and unregister it at the end; a SuperLink that
        authenticates nodes allows neither.
    device : str
        Configured id of the device; empty without one.
    """
    public_key = public_key_bytes(keys[1])
    calls.leaving = False
    with _transport(endpoint, keys, calls.wait_for) as (transport, channel):

        def invoke(name: str, request: ProtoMessage) -> Any:
            return calls.invoke(partial(transport, name), request)

        if register:
            invoke("RegisterNode", RegisterNodeFleetRequest(public_key=public_key))
        server = _greeted(transport, calls, device)
        direct, latency = None, endpoint.latency
        if channel is not None and server is not None:
            direct = Direct(channel, calls.invoke, calls.wait_for, latency)
        is_ours = server is not None
        interval = _PROMISED_SECONDS[is_ours] * latency
        request = ActivateNodeRequest(public_key=public_key, heartbeat_interval=interval)
        node_id = invoke("ActivateNode", request).node_id
        timeout = HEARTBEAT_CALL_TIMEOUT * latency
        beat = partial(_beat, transport, Node(node_id=node_id), interval, timeout, calls)
        try:
            with _sending_heartbeats(beat, _BEAT_SECONDS[is_ours]):
                yield Link(node_id, transport, calls, direct, server, latency)
        finally:
            calls.leaving = True
            with contextlib.suppress(grpc.RpcError):
                invoke("DeactivateNode", DeactivateNodeRequest(node_id=node_id))
                if register:
                    invoke("UnregisterNode", UnregisterNodeFleetRequest(node_id=node_id))


def _greeted(transport: Transport, calls: Calls, device: str) -> Greeting | None:
    """Greet the server; return its greeting if it is `raceme serve`."""

    def greet(request: bytes, timeout: float | None = None) -> Greeting | None:
        try:
            return Greeting.from_bytes(transport.greet(request, timeout))
        except grpc.RpcError as error:
            unknown = error.code() is grpc.StatusCode.UNIMPLEMENTED
            # Over HTTP a SuperLink may answer an unknown call with any refusal.
            if unknown or (isinstance(error, HttpError) and error.code() in _REFUSED):
                return None
            raise
        except ValueError:
            return None

    own = replace(own_greeting(), device=device[:LONGEST_ID])
    greeting: Greeting | None = calls.invoke(greet, own.to_bytes())
    return greeting


_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


@contextlib.contextmanager
def _transport(
    endpoint: Endpoint, keys: Keys, wait_for: Callable[[grpc.Future], bool]
) -> Iterator[tuple[Transport, grpc.Channel | None]]:
    """Open a transport of signed calls, with its channel if it is gRPC."""
    if endpoint.transport == HTTP:
        with contextlib.closing(_HttpTransport(endpoint, Signer(*keys))) as transport:
            yield transport, None
    else:
        with signed_channel(endpoint, keys) as channel:
            yield _GrpcTransport(channel, wait_for), channel


def open_channel(endpoint: Endpoint) -> grpc.Channel:
    """Open a channel without signatures."""
    # gRPC's minimum back-off is also the least time that it allows for an attempt to connect.
    connect = ("grpc.min_reconnect_backoff_ms", round(1000 * _CONNECT_SECONDS * endpoint.latency))
    options = [*_CHANNEL_OPTIONS, connect]
    if endpoint.insecure:
        return grpc.insecure_channel(endpoint.address, options=options)
    credentials = grpc.ssl_channel_credentials(endpoint.root_certificates)
    return grpc.secure_channel(endpoint.address, credentials, options=options)


def signed_channel(endpoint: Endpoint, keys: Keys) -> grpc.Channel:
    """Open a channel on which every call is signed."""
    return grpc.intercept_channel(open_channel(endpoint), _SigningInterceptor(Signer(*keys)))


def is_pull(request: object) -> bool:
    """Return whether a request asks for the next message, which is handed out only once."""
    return isinstance(request, PullMessagesRequest)


def is_object_push(request: object) -> bool:
    """Return whether a request sends an object of a message, which is accepted only once."""
    return isinstance(request, PushObjectRequest)


def error_text(error: grpc.RpcError) -> str:
    """Return the message of the SuperLink, or of gRPC, about a failed call."""
    details = str(error.details() if hasattr(error, "details") else error)
    stated = FlowerError.from_json(details)
    if stated:
        return stated.message
    with contextlib.suppress(ValueError, TypeError, KeyError):
        # Over HTTP.
        return str(json.loads(details)["detail"])
    return details


# -----------------------------------------------------------------------------
# The key probe: whether a SuperLink knows a key. A device that cannot go online does not learn it
# otherwise.
# -----------------------------------------------------------------------------


_QUESTION_SECONDS = 5.0
_KNOWS: dict[int, bool] = {
    ErrorNumber.FLEET_NODE_ACTIVATION_FAILED: False,
    ErrorNumber.FLEET_INVALID_HEARTBEAT_INTERVAL: True,
}


def knows_key(endpoint: Endpoint, keys: Keys) -> bool | None:
    """Return whether a SuperLink knows a key, in use or not; None if that is unknown.

    A SuperLink does not tell a node why it cannot go online. The probe is an impossible request,
    whose refusal differs for known keys.
    """
    request = ActivateNodeRequest(public_key=public_key_bytes(keys[1]), heartbeat_interval=-1.0)
    with _transport(endpoint, keys, lambda _call: True) as (transport, _):
        try:
            transport("ActivateNode", request, _QUESTION_SECONDS * endpoint.latency)
        except grpc.RpcError as error:
            stated = FlowerError.from_json(str(error.details()))
            return None if stated is None else _KNOWS.get(int(stated.code))
    return None
