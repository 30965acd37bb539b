"""A device's side of Flower's Fleet API (gRPC), and the calls that Raceme's devices make beside it.

A device greets the server before it goes online; a server of Flower's own does not know the call,
and both then keep to Flower's. `Next` asks for a message, waits for it at the server, and brings it
whole; `Send` takes a whole reply: two calls for an update. Like all calls they are signed.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self, cast, get_type_hints

import grpc
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.client.grpc_rere_client.connection import grpc_request_response
from flwr.client.grpc_rere_client.node_auth_client_interceptor import NodeAuthClientInterceptor
from flwr.common.serde import message_from_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    PullMessagesResponse,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.fleet_pb2 import PullMessagesRequest as PullMessagesRequest
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.fab import Fab
from flwr.supercore.grpc import GRPC_MAX_MESSAGE_LENGTH, on_channel_state_change
from flwr.supercore.inflatable import inflatable_object as inflatable
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError as ObjectPullError
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError as ObjectPushError
from flwr.supercore.inflatable.inflatable_utils import (
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.interceptors import RuntimeVersionClientInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.retry import RetryInvoker
from flwr.supercore.run import Run as Run

from raceme import __version__
from raceme.flower.messages import decode, encode, joined, parted, set_message_id, size_of, split

SERVICE = "raceme.Fleet"
GREET, NEXT, SEND = "Greet", "Next", "Send"
PROTOCOL = 2
"""Raised when calls, or what travels in them, change."""
LONGEST_WAIT = 15.0
"""Seconds that `Next` may take to be answered; routers drop connections on which nothing happens
for longer than about a minute."""
LARGEST = 1024 * 1024
"""Bytes of the arrays of a message that travels whole; a larger one does in Flower's objects, each
of which can be sent again. One call has to get through a slow link."""

_LONGEST_HEAD = 1000
"""Bytes of all that a call states beside its body."""


class _Travelling:
    """What is said in a call: fields as JSON, then, behind a zero byte, a body if there is one."""

    def to_bytes(self) -> bytes:
        """Return it as it travels."""
        stated = dict(vars(self))
        body: bytes = stated.pop("body", b"")
        return json.dumps(stated).encode() + b"\0" + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read it; what else later versions say is left out.

        Raises
        ------
        ValueError
            It is none.
        """
        head, _, body = data.partition(b"\0")
        read = json.loads(head) if len(head) < _LONGEST_HEAD else None
        stated = {**read, "body": body} if isinstance(read, dict) else {}
        kinds = get_type_hints(cls)
        if any(type(stated.get(name)) is not kind for name, kind in kinds.items()):
            raise ValueError(f"no {cls.__name__}")
        return cls(**{name: stated[name] for name in kinds})


@dataclass(frozen=True)
class Greeting(_Travelling):
    """A device greets, or a server answers its greeting.

    Attributes
    ----------
    protocol : int
        Version of these calls.
    version : str
        Version of Raceme.
    """

    protocol: int
    version: str


@dataclass(frozen=True)
class NextRequest(_Travelling):
    """A node asks for its next message.

    Attributes
    ----------
    node : int
        The node.
    patience : float
        Seconds that the answer may take.
    have : str
        Id of the last message that has arrived there; empty if there was none.
    """

    node: int
    patience: float = 0.0
    have: str = ""


@dataclass(frozen=True)
class SendRequest(_Travelling):
    """A node answers a message.

    Attributes
    ----------
    node : int
        The node.
    asked : str
        Id of the message.
    body : bytes
        The whole reply.
    """

    node: int
    asked: str
    body: bytes


# -----------------------------------------------------------------------------
# A device's calls at a server that is Raceme's too.
# -----------------------------------------------------------------------------


_SLACK_SECONDS = 5.0
"""How much longer than its patience a request for work may take."""


class Direct:
    """The calls of `raceme.flower.fleet_client`, on behalf of one node.

    Parameters
    ----------
    channel : grpc.Channel
        To the server; it signs calls.
    invoke : Callable
        Makes a call, as often as need be.
    wait_for : Callable
        Waits for the end of a call; returns whether it has come, not a reason to stop.

    Attributes
    ----------
    waited : bool
        The last request for work has waited at the server in vain.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        invoke: Callable[..., Any],
        wait_for: Callable[[grpc.Future], bool],
    ) -> None:
        self._invoke = invoke
        self._greeting = channel.unary_unary(f"/{SERVICE}/{GREET}")
        self._next = _interruptible(channel.unary_unary(f"/{SERVICE}/{NEXT}"), wait_for, None)
        self._send = channel.unary_unary(f"/{SERVICE}/{SEND}")
        self._have = ""
        self.waited = False

    def greet(self) -> bool:
        """Greet the server; return whether it is Raceme's."""

        def greet(request: bytes, timeout: float | None = None) -> bool:
            try:
                self._greeting(request, timeout=timeout)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                    raise
                return False
            return True

        return bool(self._invoke(greet, Greeting(PROTOCOL, __version__).to_bytes()))

    def next(self, node_id: int, patience: float) -> tuple[Message, ObjectTree | None] | None:
        """Return the next message: whole, or its head and the tree of its objects."""
        patience = min(max(patience, 0.0), LONGEST_WAIT)
        request = NextRequest(node_id, patience, self._have).to_bytes()
        answer = self._invoke(self._next, request, timeout=patience + _SLACK_SECONDS)
        parts = split(answer) if answer is not None else []
        self.waited = answer is not None and not parts
        if not parts:
            return None
        form, data = parts
        tree: ObjectTree | None = None
        if form == b"whole":
            message = decode(data)
        else:
            pulled = PullMessagesResponse.FromString(data)
            message = message_from_proto(pulled.messages_list[0])
            tree = pulled.message_object_trees[0]
        self._have = message.metadata.message_id
        return message, tree

    def send(self, node_id: int, reply: Message) -> bool:
        """Send a whole reply; return whether it was small enough for that."""
        if size_of(reply) > LARGEST:
            return False
        asked = reply.metadata.reply_to_message_id
        self._invoke(self._send, SendRequest(node_id, asked, encode(reply)).to_bytes())
        return True


# -----------------------------------------------------------------------------
# A SuperNode's side of Flower's Fleet protocol (gRPC, request and response).
#
# Calls, authentication, heartbeats and objects are Flower's own code. What differs from a stock
# SuperNode is how failures are decided about: every call goes through the caller's `Calls`, and
# nothing in here ends the process.
# -----------------------------------------------------------------------------


Keys = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]

_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", GRPC_MAX_MESSAGE_LENGTH),
    ("grpc.max_receive_message_length", GRPC_MAX_MESSAGE_LENGTH),
    # Connections of one process to one server would otherwise be shared: each device has its own.
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC's own pauses between two attempts to connect grow to two minutes, during which every
    # call fails at once; the device has its own back-off.
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5000),
]


@dataclass(frozen=True)
class Endpoint:
    """Where a SuperLink's Fleet API is, and how it is recognised.

    Attributes
    ----------
    address : str
        ``HOST:PORT``.
    insecure : bool
        Plain text instead of TLS.
    root_certificates : bytes or None
        PEM of the certificate authority; None stands for those that gRPC brings.
    """

    address: str
    insecure: bool = False
    root_certificates: bytes | None = None


@dataclass(frozen=True)
class Certificates:
    """What proves who the server is, all in PEM.

    Attributes
    ----------
    authority, certificate, key : bytes
        Certificate of the authority, the server's own, and its private key.
    """

    authority: bytes
    certificate: bytes
    key: bytes


class Calls(Protocol):
    """Makes remote calls, and decides how often and with which deadline.

    Attributes
    ----------
    max_tries : int or None
        Flower sets it to 1 when the connection is given up.
    pull_failed : bool
        True if a request for the next message failed after it may have reached the SuperLink,
        which hands a message out only once.
    """

    max_tries: int | None
    pull_failed: bool

    def invoke(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `target`, again and again if need be."""
        ...

    def answered(self) -> None:
        """Note that the SuperLink has answered a heartbeat."""
        ...

    def wait_for(self, call: grpc.Future) -> bool:
        """Wait for the end of a call; return whether it has come, not a reason to stop."""
        ...


_SIGNED_SECONDS = 20.0
"""How long a signature is used. What is signed is the time; a SuperLink accepts it for 300 s."""
ANNOUNCED_SECONDS = 30.0
"""Longest wait for the rest of a message. If its sender has died it will never come, and Flower
would wait for two hours; the device is deaf meanwhile."""


class RejoinError(Exception):
    """The node has to join again; the message says why."""


@dataclass
class Link:
    """An open connection on behalf of one node that is online.

    Its calls but for those of `direct` are Flower's, as its code yields them.
    """

    node_id: int
    _receive: Callable[[], tuple[Message, ObjectTree] | None]
    _send: Callable[[Message, ObjectTree, float], tuple[set[str], str]]
    _get_run: Callable[[int], Run]
    _get_fab: Callable[[str, int], Fab]
    _pull_object: Callable[[int, str], bytes]
    _push_object: Callable[[int, str, str, bytes], None]
    _confirm: Callable[[int, str], None]
    _calls: Calls
    _direct: Direct | None

    @property
    def waited(self) -> bool:
        """Whether the server has let the device wait for work: it may be asked again at once."""
        return self._direct is not None and self._direct.waited

    def receive(self, patience: float = 0.0) -> tuple[Message, Callable[[], Message]] | None:
        """Return the next message without its content, and a function that fetches it whole.

        Parameters
        ----------
        patience : float
            Seconds to wait for it, if the server can let a device wait.

        Raises
        ------
        RejoinError
            A message may have been lost on its way: only a new start makes that known. A server of
            ours hands it out again.
        """
        if self._direct is not None:
            received = self._direct.next(self.node_id, patience)
        else:
            received = self._receive()
            doubtful, self._calls.pull_failed = self._calls.pull_failed, False
            if received is None and doubtful:
                raise RejoinError("the network failed while it asked for work")
        if received is None:
            return None
        message, tree = received
        if tree is None:
            return message, lambda: message
        return message, partial(self._inflate, message.metadata.run_id, tree)

    def _inflate(self, run_id: int, tree: ObjectTree) -> Message:
        message = pull_and_inflate_object_from_tree(
            tree,
            partial(self._pull_object, run_id),
            partial(self._confirm, run_id),
            return_type=Message,
            # The server app may still be sending what the message announces.
            initial_backoff=0.05,
            max_tries_per_object=None,
            max_time=ANNOUNCED_SECONDS,
        )
        message = parted(message)
        set_message_id(message, tree.object_id)
        return message

    def send(self, reply: Message, seconds: float) -> None:
        """Send a reply, and how long it took to compute."""
        if self._direct is not None:
            if self._direct.send(self.node_id, reply):
                return
            reply = joined(reply)
        set_message_id(reply, reply.object_id)
        with inflatable.no_object_id_recompute():
            missing, session = self._send(reply, inflatable.get_object_tree(reply), seconds)
            push_objects(
                inflatable.get_all_nested_objects(reply),
                partial(self._push_object, reply.metadata.run_id, session),
                object_ids_to_push=missing,
            )

    def run(self, run_id: int) -> Run:
        """Return what the SuperLink says about a run."""
        return self._get_run(run_id)

    def bundle(self, run: Run) -> bytes:
        """Fetch the Flower App Bundle of a run."""
        return self._get_fab(run.fab_hash, run.run_id).content


class _Escape(BaseException):
    """Carries an error past Flower's connection code, which would end the process for it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _Unavailable(grpc.RpcError):  # type: ignore[misc]
    """Tells Flower's heartbeat thread to try again later; the main thread decides what to do."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE


class _Guard:
    """Stands between Flower's connection code and the caller's `Calls`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.connecting = True
        self.max_tries: int | None = None

    def invoke(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], SendNodeHeartbeatRequest):
            return self._beat(target, *args, **kwargs)
        self._calls.max_tries = self.max_tries
        try:
            return self._calls.invoke(target, *args, **kwargs)
        except Exception as error:
            if self.connecting:
                raise _Escape(error) from error
            raise

    def _beat(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make one heartbeat; whatever goes wrong with it must not end its thread."""
        try:
            response = target(*args, **kwargs)
        except grpc.RpcError as error:
            raise _Unavailable from error
        if not response.success:
            raise _Unavailable
        self._calls.answered()
        return response


def _interruptible(
    method: grpc.UnaryUnaryMultiCallable, wait_for: Callable[[grpc.Future], bool], instead: Any
) -> Callable[..., Any]:
    """Return a call that a reason to stop can end; it then returns something else."""

    def call(request: Any, timeout: float | None = None) -> Any:
        made = method.future(request, timeout=timeout)
        return made.result() if wait_for(made) else instead

    return call


class _Signer(NodeAuthClientInterceptor):
    """Flower's signature of calls, made once for a while: it is of the time, not of the call."""

    def __init__(self, keys: Keys) -> None:
        super().__init__(*keys)
        self._signed: list[tuple[str, str | bytes]] = []
        self._signed_at = float("-inf")

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], details: Any, request: Any
    ) -> Any:
        before = list(details.metadata or [])
        if time.monotonic() < self._signed_at + _SIGNED_SECONDS:
            signed = details._replace(metadata=[*before, *self._signed])
            return continuation(signed, request)

        def keep(signed: Any, request: Any) -> Any:
            self._signed = list(signed.metadata)[len(before) :]
            self._signed_at = time.monotonic()
            return continuation(signed, request)

        return super().intercept_unary_unary(keep, details, request)


@contextlib.contextmanager
def connect(endpoint: Endpoint, keys: Keys, calls: Calls, *, register: bool) -> Iterator[Link]:
    """Join a SuperLink; on the way out the node goes offline.

    Parameters
    ----------
    endpoint : Endpoint
        The SuperLink.
    keys : Keys
        The node's own; each one stands for one node.
    calls : Calls
        Makes the calls, from several threads.
    register : bool
        Make the node known first, and forget it on the way out; a SuperLink that authenticates
        its nodes allows neither.
    """
    guard = _Guard(calls)
    public_key = public_key_to_bytes(keys[1])
    stubs: list[FleetStub] = []
    channels: list[grpc.Channel] = []
    directs: list[Direct | None] = []

    def make_stub(unused: grpc.Channel) -> FleetStub:
        plain = open_channel(endpoint)
        signer = _Signer(keys)
        versions = RuntimeVersionClientInterceptor(component_name="SuperNode")
        # Only to log it would a thread look at the state of Flower's channel five times a second.
        unused.unsubscribe(on_channel_state_change)
        # Flower closes the channel that it made only after this function has returned.
        channels.extend((unused, plain))
        stub = FleetStub(grpc.intercept_channel(plain, versions, signer))
        # Flower's check of versions blocks until a call has ended; one that waits must not.
        signed = grpc.intercept_channel(plain, signer)
        pull = FleetStub(signed).PullMessages
        stub.PullMessages = _interruptible(pull, calls.wait_for, PullMessagesResponse())
        if register:
            request = RegisterNodeFleetRequest(public_key=public_key)
            guard.invoke(stub.RegisterNode, request)
        direct = Direct(signed, guard.invoke, calls.wait_for)
        directs.append(direct if direct.greet() else None)
        stubs.append(stub)
        return stub

    failure: BaseException | None = None
    try:
        with grpc_request_response(
            endpoint.address,
            endpoint.insecure,
            cast(RetryInvoker, guard),
            root_certificates=endpoint.root_certificates,
            authentication_keys=keys,
            adapter_cls=cast(type[FleetStub], make_stub),
        ) as connection:
            guard.connecting = False
            try:
                yield Link(*connection, _calls=calls, _direct=directs[0])
            # Flower's code swallows what is raised here; it is raised again below.
            except BaseException as error:
                failure = error
            guard.max_tries = 1
            if register:
                request = UnregisterNodeFleetRequest(node_id=connection[0])
                with contextlib.suppress(grpc.RpcError):
                    # Flower has wrapped the stub's methods: this one goes through `guard` too.
                    stubs[0].UnregisterNode(request)
    except _Escape as escape:
        raise escape.error from None
    finally:
        for channel in channels:
            channel.close()
    if failure is not None:
        raise failure


def open_channel(endpoint: Endpoint) -> grpc.Channel:
    """Open a channel on which nothing is signed yet."""
    if endpoint.insecure:
        return grpc.insecure_channel(endpoint.address, options=_CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(endpoint.root_certificates)
    return grpc.secure_channel(endpoint.address, credentials, options=_CHANNEL_OPTIONS)


def is_pull(request: object) -> bool:
    """Return whether a request asks for the next message, which is handed out only once."""
    return isinstance(request, PullMessagesRequest)


def is_object_push(request: object) -> bool:
    """Return whether a request hands over a part of a message, which is taken only once."""
    return isinstance(request, PushObjectRequest)


def error_text(error: grpc.RpcError) -> str:
    """Return what the SuperLink, or gRPC, says about a failed call."""
    details = str(error.details() if hasattr(error, "details") else error)
    stated = FlowerError.from_json(details)
    return stated.message if stated else details


def generate_keys() -> Keys:
    """Make a key pair for a node that registers itself."""
    return generate_key_pairs()


# -----------------------------------------------------------------------------
# The key probe: whether a SuperLink knows a key, which it does not say to a device that waits.
# -----------------------------------------------------------------------------


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
