"""The server's side of Flower's Fleet API, over gRPC and HTTP, and of Raceme's own calls.

Calls are answered in one event loop, so that many devices can wait at the server for work. The
caller is authenticated before the body of a call is read.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
from flwr.app import Message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fab_pb2 import GetFabResponse
from flwr.proto.fleet_pb2 import (
    ActivateNodeResponse,
    DeactivateNodeResponse,
    PullMessagesResponse,
    PushMessagesResponse,
    Reconnect,
    RegisterNodeFleetResponse,
    UnregisterNodeFleetResponse,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedResponse,
    ObjectTree,
    PullObjectResponse,
    PushObjectResponse,
)
from flwr.proto.run_pb2 import GetRunResponse
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from raceme.flower.fleet_protocol import (
    CALLS,
    FLEET_SERVICE,
    GREET,
    GREET_PATH,
    HEARTBEAT_MAX_INTERVAL,
    HEARTBEAT_MIN_INTERVAL,
    LARGEST_CALL,
    LATENCY,
    LONGEST_ID,
    LONGEST_WAIT,
    MEDIA_TYPE,
    NEXT,
    SEND,
    SERVICE,
    SINCE,
    Caller,
    Certificates,
    ErrorNumber,
    FleetError,
    Greeting,
    NextRequest,
    SendRequest,
    Signatures,
    own_greeting,
    path_of,
)
from raceme.flower.link_state import FleetObserver, LinkState
from raceme.flower.messages import encode, join
from raceme.flower.ports import http_server, listen, server_tls

log = logging.getLogger("raceme.serve")

_Code = grpc.StatusCode
_START_SECONDS = 30.0
_END_SECONDS = 2.0
_HANDSHAKE_SECONDS, _PING_SECONDS = 10.0, 20.0
"""Time limits of a handshake and of the answer to a ping, to be multiplied by the latency."""
_REGISTRY_SECONDS = 1.0
"""Interval of checks of the registered keys."""
_FOREIGN_REPLY = "a reply of another node"
_REPLACED = (
    "another process with this device's key has taken its place. Each device needs a key of its own"
)

_OPTIONS = [
    ("grpc.max_send_message_length", LARGEST_CALL),
    # Compressed calls are refused: a kilobyte may become a megabyte.
    ("grpc.per_message_decompression", 0),
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.max_concurrent_streams", 16),
    ("grpc.keepalive_time_ms", 210_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Calls may wait as long as devices do, and are not cancelled after 30 s.
    ("grpc.server_max_unrequested_time_in_server", 120),
    # gRPC would otherwise reject some at random when more than a thousand arrive at once.
    ("grpc.server.max_pending_requests", 10_000),
    ("grpc.server.max_pending_requests_hard_limit", 20_000),
    # Two servers on one port would each get some of the devices.
    ("grpc.so_reuseport", 0),
]


class PortInUseError(Exception):
    """The server cannot listen on an address.

    Parameters
    ----------
    address : str
        ``HOST:PORT``.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address


class FleetCalls:
    """Answers the calls of Flower's Fleet API, over any transport, from a link state.

    Parameters
    ----------
    state : LinkState
        Nodes and messages of the run.
    registered : Callable, optional
        Returns the device of each public key (PEM) of the nodes that may take part; by default all
        nodes may.
    holder : Callable
        Returns the id that is bound to a public key (PEM), or an empty text.

    Attributes
    ----------
    on_call : Callable
        Called with each node that makes a call.
    """

    def __init__(
        self,
        state: LinkState,
        registered: Callable[[], Mapping[bytes, str]] | None = None,
        holder: Callable[[bytes], str] = lambda _key: "",
    ) -> None:
        self._state, self._registered, self._holder = state, registered, holder
        self._signatures = Signatures()
        self.on_call: Callable[[int], None] = lambda _node: None

    def caller(self, name: str, metadata: Mapping[str, Any]) -> Caller:
        """Return the process that has made and signed a call.

        Raises
        ------
        FleetError
            As in :meth:`Signatures.caller`; or the key is not registered; or the key is new, and
            the call is not one of a new node.
        """
        caller = self._signatures.caller(metadata)
        key = caller.key
        is_known = self._state.node_of(key) is not None
        if not is_known and self._registered is not None:
            # The key may have been registered meanwhile.
            self.admit()
            is_known = self._state.node_of(key) is not None
        # Signatures of unknown keys are not cached: a caller can make any number of keys.
        if is_known:
            self._signatures.remember(key, metadata)
        elif name not in _FIRST:
            raise _unknown_node()
        elif self._registered is not None:
            raise _not_registered() if name == _REGISTER else _not_activated()
        return caller

    def answer(self, name: str, caller: Caller, request: Any) -> ProtoMessage:
        """Answer a call that a node has signed with its key.

        Raises
        ------
        FleetError
            The call is refused.
        """
        if name in (_REGISTER, _ACTIVATE):
            if request.public_key != caller.key:
                raise FleetError(_Code.UNAUTHENTICATED, "Public key does not match request")
            if name == _ACTIVATE:
                return self._activate_node(request, caller.session)
        else:
            self.check(
                caller, request.node.node_id if hasattr(request, "node") else request.node_id
            )
        if getattr(request, "run_id", self._state.run_id) != self._state.run_id:
            raise _refused(ErrorNumber.FLEET_RUN_STATUS_NOT_ALLOWED, "This server has another run")
        answer: Callable[[Any], ProtoMessage] = getattr(self, f"_{_SNAKE[name]}")
        return answer(request)

    def check(self, caller: Caller, node: int) -> None:
        """Refuse a call for another node, and a call of a replaced process."""
        if self._state.node_of(caller.key) != node:
            raise _unknown_node()
        if not self._state.is_current(node, caller.session):
            raise FleetError(_Code.FAILED_PRECONDITION, _REPLACED)
        self.on_call(node)

    def greet(self, caller: Caller, request: bytes) -> tuple[bytes, int | None]:
        """Answer the greeting of one of Raceme's devices; return its node, too.

        Raises
        ------
        FleetError
            Its protocol is not supported, or the id that it states is not that of its key.
        """
        greeting, own = Greeting.from_bytes(request), own_greeting()
        node = self._state.node_of(caller.key)
        if greeting.protocol != own.protocol:
            raise self._refusal(_other_protocol(greeting, own))
        # Logged only for known nodes, since any process can greet any number of times.
        if node is None:
            return own.to_bytes(), None
        registered = {} if self._registered is None else self._registered()
        name = registered.get(caller.key, "")
        if difference := greeting.difference(own):
            fields = {"device": name or f"node {node}"}
            text = "The device on node %d has %s"
            log.warning(text, node, difference, extra={"fields": fields})
        bound = self._holder(caller.key)
        stated = greeting.device[:LONGEST_ID]
        if bound and stated not in ("", bound):
            raise self._refusal(
                f"It states the id {stated!a}, but its key is that of '{bound}': start it with "
                f"--device-id {bound}, or with the key of {stated!a}"
            )
        present = self._state.device_on(node)
        if not bound and stated and present not in ("", stated):
            raise self._refusal(
                f"It states the id {stated!a}, but a process with its key is online as "
                f"'{present}': each device needs a key of its own"
            )
        self._state.introduce(node, caller.session, stated or bound or name)
        return replace(own, device=bound or name).to_bytes(), node

    def _refusal(self, details: str) -> FleetError:
        """Log and return the refusal of a device."""
        error = FleetError(_Code.FAILED_PRECONDITION, details)
        self._signatures.warn(error)
        return error

    def admit(self) -> None:
        """Admit the registered nodes, if there is a list of them."""
        if self._registered is not None:
            self._state.admit(self._registered())

    # One method per call, in the order in which a node makes them.

    def _register_node(self, request: Any) -> ProtoMessage:
        if self._registered is not None:
            raise _not_registered()
        self._state.make_room()
        try:
            node = self._state.register(request.public_key)
        except ValueError:
            raise _refused(
                ErrorNumber.PUBLIC_KEY_ALREADY_IN_USE, "Public key already in use"
            ) from None
        return RegisterNodeFleetResponse(node_id=node)

    def _activate_node(self, request: Any, session: str) -> ProtoMessage:
        node = self._state.node_of(request.public_key)
        if node is not None:
            _check_interval(request.heartbeat_interval)
            if self._state.activate(node, request.heartbeat_interval, session):
                return ActivateNodeResponse(node_id=node)
        raise _not_activated()

    def _send_node_heartbeat(self, request: Any) -> ProtoMessage:
        _check_interval(request.heartbeat_interval)
        node, interval = request.node.node_id, request.heartbeat_interval
        success = self._state.beat(node, interval)
        return SendNodeHeartbeatResponse(success=success)

    def _get_run(self, request: Any) -> ProtoMessage:
        return GetRunResponse(run=self._state.run_record())

    def _get_fab(self, request: Any) -> ProtoMessage:
        fab = self._state.bundle(request.hash_str)
        if fab is None:
            raise _refused(ErrorNumber.FLEET_GET_FAB_FAILED, "There is no such app bundle")
        return GetFabResponse(fab=fab)

    def _pull_messages(self, request: Any) -> ProtoMessage:
        found = self._state.next_announced(request.node.node_id)
        return PullMessagesResponse() if found is None else _announced(*found)

    def _pull_object(self, request: Any) -> ProtoMessage:
        content = self._state.get_object(request.object_id)
        return PullObjectResponse(
            object_found=content is not None,
            object_available=bool(content),
            object_content=content or b"",
        )

    def _confirm_message_received(self, request: Any) -> ProtoMessage:
        self._state.confirm(request.message_object_id)
        return ConfirmMessageReceivedResponse()

    def _push_messages(self, request: Any) -> ProtoMessage:
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise FleetError(_Code.INVALID_ARGUMENT, "One reply is expected, with its objects")
        (head,) = request.messages_list
        if head.metadata.src_node_id != request.node.node_id:
            raise FleetError(_Code.PERMISSION_DENIED, _FOREIGN_REPLY)
        message = message_from_proto(head)
        session, missing = self._state.announce(message, request.message_object_trees[0])
        return PushMessagesResponse(
            reconnect=Reconnect(reconnect=5),
            results={message.metadata.message_id: 0},
            objects_to_push=missing,
            session_id=session,
        )

    def _push_object(self, request: Any) -> ProtoMessage:
        stored = self._state.put_object(
            request.session_id, request.object_id, request.object_content
        )
        return PushObjectResponse(stored=stored)

    def _deactivate_node(self, request: Any) -> ProtoMessage:
        if not self._state.deactivate(request.node_id):
            raise _refused(
                ErrorNumber.FLEET_NODE_DEACTIVATION_FAILED, "Failed to deactivate the node"
            )
        return DeactivateNodeResponse()

    def _unregister_node(self, request: Any) -> ProtoMessage:
        if self._registered is not None:
            raise _refused(
                ErrorNumber.FLEET_SUPERNODE_UNREGISTRATION_DISABLED,
                "All nodes must be unregistered by the server's owner",
            )
        self._state.unregister(request.node_id)
        return UnregisterNodeFleetResponse()


_REGISTER, _ACTIVATE = "RegisterNode", "ActivateNode"
_FIRST = {_REGISTER, _ACTIVATE, GREET}
"""Calls that unknown nodes may make."""
_SNAKE = {name: path_of(name).rpartition("/")[2].replace("-", "_") for name in CALLS}


_CODES = {
    ErrorNumber.PUBLIC_KEY_ALREADY_IN_USE: _Code.FAILED_PRECONDITION,
    ErrorNumber.FLEET_SUPERNODE_REGISTRATION_DISABLED: _Code.FAILED_PRECONDITION,
    ErrorNumber.FLEET_SUPERNODE_UNREGISTRATION_DISABLED: _Code.FAILED_PRECONDITION,
    ErrorNumber.FLEET_INVALID_HEARTBEAT_INTERVAL: _Code.INVALID_ARGUMENT,
    ErrorNumber.FLEET_NODE_ACTIVATION_FAILED: _Code.FAILED_PRECONDITION,
    ErrorNumber.FLEET_NODE_DEACTIVATION_FAILED: _Code.FAILED_PRECONDITION,
    ErrorNumber.FLEET_RUN_STATUS_NOT_ALLOWED: _Code.PERMISSION_DENIED,
    ErrorNumber.FLEET_GET_FAB_FAILED: _Code.PERMISSION_DENIED,
}
HTTP_STATUS = {
    _Code.UNAUTHENTICATED: 401,
    _Code.PERMISSION_DENIED: 403,
    _Code.UNIMPLEMENTED: 404,
    _Code.FAILED_PRECONDITION: 412,
    _Code.RESOURCE_EXHAUSTED: 413,
}


def _refused(number: ErrorNumber, details: str) -> FleetError:
    return FleetError(_CODES[number], details, int(number))


def _not_registered() -> FleetError:
    return _refused(
        ErrorNumber.FLEET_SUPERNODE_REGISTRATION_DISABLED,
        "All nodes must be registered by the server's owner",
    )


def _not_activated() -> FleetError:
    return _refused(ErrorNumber.FLEET_NODE_ACTIVATION_FAILED, "Failed to activate the node")


def _unknown_node() -> FleetError:
    # In Flower's words.
    return FleetError(_Code.UNAUTHENTICATED, "Invalid node ID")


def _check_interval(seconds: float) -> None:
    if not HEARTBEAT_MIN_INTERVAL <= seconds <= HEARTBEAT_MAX_INTERVAL:
        raise _refused(ErrorNumber.FLEET_INVALID_HEARTBEAT_INTERVAL, "Invalid heartbeat interval")


def _announced(message: Message, tree: ObjectTree) -> PullMessagesResponse:
    """Return the head of a message, and the objects of its content."""
    return PullMessagesResponse(
        messages_list=[message_to_proto(message)], message_object_trees=[tree]
    )


Answer = Callable[[Caller, Any], Awaitable[Any]]
"""Answers a call over gRPC, given its caller and its request."""


class _GrpcCalls(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Dispatches calls over gRPC; refuses those without a known signature before reading the body.

    Parameters
    ----------
    calls : FleetCalls
        Check of the callers.
    answers : Mapping[str, Answer]
        Answers of Raceme's own calls, by their paths; Flower's are those of `calls`.
    """

    def __init__(self, calls: FleetCalls, answers: Mapping[str, Answer]) -> None:
        self._calls, self._answers = calls, answers

    def service(self, details: Any) -> Any:
        """Return the handler of a call, by its path and metadata; None if there is no such call."""
        name = details.method.rpartition("/")[2]
        try:
            caller = self._calls.caller(name, dict(details.invocation_metadata))
        except FleetError as error:
            # A handler of a stream is called before the request is read; others are called after.
            return grpc.stream_unary_rpc_method_handler(partial(_abort, error))
        if (own := self._answers.get(details.method)) is not None:
            return grpc.unary_unary_rpc_method_handler(partial(_answered, partial(own, caller)))
        if details.method != f"/{FLEET_SERVICE}/{name}" or name not in CALLS:
            return None
        return grpc.unary_unary_rpc_method_handler(
            partial(_answered, partial(self._flowers, name, caller)),
            CALLS[name].request.FromString,
            CALLS[name].response.SerializeToString,
        )

    async def _flowers(self, name: str, caller: Caller, request: Any) -> ProtoMessage:
        return self._calls.answer(name, caller, request)


async def _answered(answer: Callable[[Any], Awaitable[Any]], request: Any, context: Any) -> Any:
    """Answer a call, or refuse it with the reason."""
    try:
        return await answer(request)
    except FleetError as error:
        await _abort(error, (), context)
    except ValueError as error:
        await context.abort(_Code.INVALID_ARGUMENT, str(error))


async def _abort(error: FleetError, _requests: object, context: Any) -> None:
    details = error.details
    if error.number is not None:
        # In the form that Flower's SuperNodes read.
        stated = {"code": error.number, "public_message": details, "public_details": None}
        details = json.dumps(stated)
    await context.abort(error.code, details)


class _HttpApi:
    """The calls over HTTP, in an event loop that another object runs.

    Parameters
    ----------
    calls : FleetCalls
        Implementation of the calls, shared with gRPC.
    address : str
        ``HOST:PORT``.
    certificates : Certificates, optional
        Certificate and key for TLS; without them the port speaks plain HTTP.

    Raises
    ------
    PortInUseError
        The port is taken.
    """

    def __init__(
        self,
        calls: FleetCalls,
        address: str,
        certificates: Certificates | None,
        connections: int,
        largest: int,
        stalled: float,
    ) -> None:
        self._calls, self._largest = calls, largest
        host, _, port = address.rpartition(":")
        try:
            self._socket = listen(host.strip("[]"), int(port), connections)
        except OSError:
            raise PortInUseError(address) from None
        names = {path_of(name): name for name in CALLS}
        routes = [
            Route(path, partial(self._answer, name), methods=["POST"])
            for path, name in {**names, GREET_PATH: GREET}.items()
        ]
        own = certificates
        tls = None if own is None else server_tls(own.certificate, own.key)
        self._server = http_server(
            Starlette(routes=routes),
            tls,
            stalled,
            log_level="error",
            timeout_keep_alive=round(stalled),
        )
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to answer; called in the event loop."""
        self._task = asyncio.get_running_loop().create_task(
            self._server.serve(sockets=[self._socket])
        )

    async def stop(self) -> None:
        """Stop answering."""
        self._server.should_exit = self._server.force_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()

    async def _answer(self, name: str, request: Request) -> Response:
        try:
            caller = self._calls.caller(name, request.headers)
            if request.headers.get("content-type", "").partition(";")[0] != MEDIA_TYPE:
                raise FleetError(_Code.INVALID_ARGUMENT, f"{MEDIA_TYPE} is expected")
            body = await _body_of(request, self._largest)
            if name == GREET:
                answer, _ = self._calls.greet(caller, body)
            else:
                asked = CALLS[name].request.FromString(body)
                answer = self._calls.answer(name, caller, asked).SerializeToString()
        except FleetError as error:
            stated: dict[str, str | int] = {"detail": error.details}
            if error.number is not None:
                stated["code"] = error.number
            return JSONResponse(stated, HTTP_STATUS.get(error.code, 400))
        except (DecodeError, ValueError):
            return JSONResponse({"detail": "The request cannot be read"}, 400)
        return Response(answer, media_type=MEDIA_TYPE)


async def _body_of(request: Request, largest: int) -> bytes:
    """Return the body of a call, without reading all of one that is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > largest:
            # In gRPC's words.
            details = f"Received message larger than max ({len(body)} vs. {largest})"
            raise FleetError(_Code.RESOURCE_EXHAUSTED, details)
    return bytes(body)


class FleetApi(FleetObserver):
    """The server: it binds its ports on entry, and answers after `start`.

    Parameters
    ----------
    state : LinkState
        What the calls are about.
    address : str
        ``HOST:PORT``.
    certificates : Certificates, optional
        For TLS; plain text without them.
    registered : Callable, optional
        Returns the public keys of the nodes that may take part (PEM), to the names of their
        devices; without it all may.
    http : str, optional
        ``HOST:PORT`` for Flower's SuperNodes from 1.40 on, which speak HTTP.
    connections : int
        Maximum number of open connections of both ports; further ones are closed at once.
    holder : Callable
        Returns the id that is bound to a public key (PEM), or an empty text.
    latency : float
        Longest time of a packet to a device, in seconds; time limits are multiples of it.

    Attributes
    ----------
    calls : FleetCalls
        Answers calls; its `on_call` is called with each node that makes one.

    Raises
    ------
    PortInUseError
        The port is taken.
    """

    def __init__(
        self,
        state: LinkState,
        address: str,
        certificates: Certificates | None = None,
        registered: Callable[[], Mapping[bytes, str]] | None = None,
        http: str | None = None,
        connections: int = 10_000,
        holder: Callable[[bytes], str] = lambda _key: "",
        latency: float = LATENCY,
    ) -> None:
        self._latency = latency
        self._connections = connections if http is None else connections // 2
        self._state, self._address, self._certificates = state, address, certificates
        self.calls = FleetCalls(state, registered, holder)
        self._http_address = http
        self._http: _HttpApi | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._waiting: dict[int, asyncio.Future[bool]] = {}
        self._with_work: deque[int] = deque()
        self._is_waking = False
        self._server: grpc.aio.Server | None = None
        self._watching: asyncio.Task[None] | None = None

    def __enter__(self) -> FleetApi:
        self._thread.start()
        try:
            self._await(self._bind())
        except BaseException:
            self._end_loop()
            raise
        self._state.observers.append(self)
        # Admitted before the first checkpoint, so that the devices keep their nodes.
        self.calls.admit()
        return self

    def __exit__(self, *_raised: object) -> None:
        self._await(self._stop())
        self._end_loop()

    def start(self) -> None:
        """Begin to answer; devices that connected earlier have waited."""
        assert self._server is not None
        self.calls.admit()
        self._await(self._start())

    async def _start(self) -> None:
        assert self._server is not None
        await self._server.start()
        if self._http is not None:
            self._http.start()
        self._watching = self._loop.create_task(self._watch_registry())

    async def _watch_registry(self) -> None:
        """Admit nodes with newly registered keys, and disconnect those with revoked ones."""
        while True:
            await asyncio.sleep(_REGISTRY_SECONDS)
            self.calls.admit()
            for node in self._waiting.keys() - self._state.nodes.keys():
                self._wake(node)

    def answers(self, seconds: float) -> bool:
        """Return whether the event loop answers within some seconds."""
        try:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(seconds)
        except TimeoutError:
            return False
        return True

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_SECONDS)
        self._loop.close()

    async def _stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        # Waiting devices get an empty answer instead of a closed connection.
        for node in list(self._waiting):
            self._wake(node)
        if self._server is not None:
            await self._server.stop(_END_SECONDS)
        if self._http is not None:
            await self._http.stop()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            await asyncio.wait(left, timeout=_END_SECONDS)

    def _await(self, work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_SECONDS)

    async def _bind(self) -> None:
        limits = [
            ("grpc.max_allowed_incoming_connections", self._connections),
            ("grpc.max_receive_message_length", self._state.largest),
            # A connection without a complete handshake is closed.
            ("grpc.server_handshake_timeout_ms", round(1000 * _HANDSHAKE_SECONDS * self._latency)),
            ("grpc.keepalive_timeout_ms", round(1000 * _PING_SECONDS * self._latency)),
        ]
        server = grpc.aio.server(options=[*_OPTIONS, *limits])
        own = {GREET: self._greet, NEXT: self._next, SEND: self._send}
        answers = {f"/{SERVICE}/{name}": answer for name, answer in own.items()}
        server.add_generic_rpc_handlers((_GrpcCalls(self.calls, answers),))
        try:
            if self._certificates is None:
                server.add_insecure_port(self._address)
            else:
                pair = (self._certificates.key, self._certificates.certificate)
                credentials = grpc.ssl_server_credentials([pair], self._certificates.authority)
                server.add_secure_port(self._address, credentials)
        except RuntimeError:
            raise PortInUseError(self._address) from None
        self._server = server
        if self._http_address is not None:
            self._http = _HttpApi(
                self.calls,
                self._http_address,
                self._certificates,
                self._connections,
                self._state.largest,
                _HANDSHAKE_SECONDS * self._latency,
            )

    async def _greet(self, caller: Caller, request: bytes) -> bytes:
        answer, node = self.calls.greet(caller, request)
        if node is not None:
            self._state.greet(node)
        return answer

    async def _next(self, caller: Caller, request: bytes) -> bytes:
        """Return the next message of a node; wait if there is none."""
        asked = NextRequest.from_bytes(request)
        self.calls.check(caller, asked.node)
        found = self._state.next_for(asked.node, asked.have)
        if found is None and await self._wait(asked.node, min(asked.patience, LONGEST_WAIT)):
            # The caller's key may have been revoked during the wait.
            self.calls.check(caller, asked.node)
            found = self._state.next_for(asked.node, asked.have)
        if found is None:
            return join([])
        message, tree = found
        if tree is None:
            return join([b"whole", encode(message)])
        return join([b"objects", _announced(message, tree).SerializeToString()])

    async def _send(self, caller: Caller, request: bytes) -> bytes:
        """Take a whole reply."""
        sent = SendRequest.from_bytes(request)
        self.calls.check(caller, sent.node)
        if not self._state.accept(sent.node, sent.asked, sent.body):
            raise FleetError(_Code.PERMISSION_DENIED, _FOREIGN_REPLY)
        return b""

    async def _wait(self, node: int, seconds: float) -> bool:
        """Wait until there is a message for a node; return whether there may be one."""
        if not seconds > 0:
            return False
        future = self._loop.create_future()
        former, self._waiting[node] = self._waiting.get(node), future
        if former is not None and not former.done():
            # The node has called again, so the answer to its earlier call would be lost.
            former.set_result(False)
        timer = self._loop.call_later(seconds, _give_up, future)
        try:
            there_is: bool = await future
            return there_is
        finally:
            timer.cancel()
            if self._waiting.get(node) is future:
                del self._waiting[node]

    def on_work(self, node_id: int) -> None:
        """Wake a node that waits for a message."""
        self._with_work.append(node_id)
        # Waking the loop from another thread writes to a socket, so one call wakes all waiting
        # nodes.
        if not self._is_waking:
            self._is_waking = True
            self._loop.call_soon_threadsafe(self._wake_all)

    def _wake_all(self) -> None:
        # A node that is added after this line causes another call.
        self._is_waking = False
        while self._with_work:
            self._wake(self._with_work.popleft())

    def _wake(self, node: int) -> None:
        future = self._waiting.get(node)
        if future is not None and not future.done():
            future.set_result(True)


def _give_up(future: asyncio.Future[bool]) -> None:
    if not future.done():
        future.set_result(False)


def _other_protocol(device: Greeting, server: Greeting) -> str:
    return (
        f"this device has raceme {device.version[:40]} (protocol {device.protocol}), the server "
        f"{server.version} (protocol {server.protocol}, which raceme {SINCE} was the first to "
        f"have): install the server's with 'pip install raceme=={server.version}', or from a "
        "checkout of that version, then start the device again"
    )
