"""Flower's Fleet API over gRPC, served from this process.

Servicer, checks of signatures and of versions are Flower's own. They are called from an event loop
instead of a thousand threads, so that a device may wait at the server until there is work for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, cast

import grpc
from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.fleet_pb2_grpc import add_FleetServicer_to_server
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.server.superlink.fleet.grpc_rere.fleet_servicer import FleetServicer
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import (
    NodeAuthServerInterceptor,
)
from flwr.supercore.grpc import GRPC_MAX_MESSAGE_LENGTH
from flwr.supercore.inflatable.inflatable_object import get_object_id
from flwr.supercore.interceptors import (
    RpcErrorTranslationServerInterceptor,
    create_fleet_runtime_version_server_interceptor,
)

from raceme.compat import parcels
from raceme.compat.link_state import LinkState
from raceme.compat.patience import LONGEST_WAIT, WAIT_HEADER

log = logging.getLogger("raceme.serve")

_SERVICE = "flwr.proto.Fleet"
_PULL, _PUSH, _ACTIVATE = "PullMessages", "PushMessages", "ActivateNode"
_START_SECONDS = 30.0
_END_SECONDS = 2.0
_PROVEN_SECONDS = 60.0
"""How long a signature that was checked counts as such. Flower accepts one for five minutes."""

_OPTIONS = [
    ("grpc.max_send_message_length", GRPC_MAX_MESSAGE_LENGTH),
    ("grpc.max_receive_message_length", GRPC_MAX_MESSAGE_LENGTH),
    ("grpc.keepalive_time_ms", 210_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Two servers on one port would each get some of the devices.
    ("grpc.so_reuseport", 0),
]


class PortInUseError(Exception):
    """The address cannot be listened at; the message says why, if that is known."""


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


class FleetApi:
    """The server: entered it holds its port, and answers once it is started.

    Parameters
    ----------
    state : LinkState
        What the calls are about.
    address : str
        ``HOST:PORT``.
    certificates : Certificates, optional
        For TLS; plain text without.
    registered : Callable, optional
        Returns the public keys of the nodes that may take part (PEM); without it all may.

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
        registered: Callable[[], Collection[bytes]] | None = None,
    ) -> None:
        self._state, self._address, self._certificates = state, address, certificates
        self._registered = registered
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._calls = _calls(state, registered is not None)
        self._server: grpc.aio.Server | None = None

    def __enter__(self) -> FleetApi:
        self._thread.start()
        try:
            self._await(self._bind())
        except BaseException:
            self._end_loop()
            raise
        self._state.on_work = self._on_work
        # The first checkpoint has them already, so that they stay the nodes that they are.
        self._admit()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._await(self._stop())
        self._end_loop()

    def start(self) -> None:
        """Begin to answer; until then devices that connect have to wait."""
        assert self._server is not None
        self._admit()
        self._await(self._server.start())

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_SECONDS)
        self._loop.close()

    async def _stop(self) -> None:
        # Devices that wait are told that there is nothing, instead of being cut off.
        for node in list(self._waiting):
            self._wake(node)
        if self._server is not None:
            await self._server.stop(_END_SECONDS)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            await asyncio.wait(left, timeout=_END_SECONDS)

    def _await(self, work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_SECONDS)

    async def _bind(self) -> None:
        server = grpc.aio.server(options=_OPTIONS)
        for service, calls in self._calls.services.items():
            handlers = {
                name: grpc.unary_unary_rpc_method_handler(
                    partial(self._answer, name), call.request_deserializer, call.response_serializer
                )
                for name, call in calls.items()
            }
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service, handlers),)
            )
        try:
            if self._certificates is None:
                server.add_insecure_port(self._address)
            else:
                own = (self._certificates.key, self._certificates.certificate)
                credentials = grpc.ssl_server_credentials([own], self._certificates.authority)
                server.add_secure_port(self._address, credentials)
        except RuntimeError as error:
            raise PortInUseError(str(error)) from None
        self._server = server

    def _admit(self) -> None:
        if self._registered is not None:
            self._state.admit(self._registered())

    async def _answer(self, name: str, request: Any, context: Any) -> Any:
        """Answer one call; one for work may wait until there is some."""
        metadata = context.invocation_metadata()
        if name == _ACTIVATE and self._registered is not None:
            self._look_for_key(request)
        response = await self._call(name, request, metadata, context)
        patience = _patience(metadata) if name == _PULL else None
        if patience is None:
            return response
        context.set_trailing_metadata(((WAIT_HEADER, "1"),))
        if response.messages_list:
            return response
        # Raceme's devices ask for the next message when they are done with the last.
        node = request.node.node_id
        if self._state.hand_out_again(node) or (patience and await self._wait(node, patience)):
            response = await self._call(name, request, metadata, context)
        return response

    async def _call(self, name: str, request: Any, metadata: Any, context: Any) -> Any:
        try:
            return self._calls.answer(name, request, metadata)
        except _AbortedError as aborted:
            await context.abort(aborted.code, aborted.details)

    def _look_for_key(self, request: ActivateNodeRequest) -> None:
        """Look whether a node with an unknown key has been registered meanwhile."""
        if self._state.get_node_id_by_public_key(request.public_key) is None:
            self._admit()

    async def _wait(self, node: int, seconds: float) -> bool:
        """Wait until there is a message for a node; return whether there may be one."""
        future = self._loop.create_future()
        former, self._waiting[node] = self._waiting.get(node), future
        if former is not None and not former.done():
            former.set_result(None)
        try:
            await asyncio.wait_for(future, seconds)
        except TimeoutError:
            return False
        finally:
            if self._waiting.get(node) is future:
                del self._waiting[node]
        return True

    def _on_work(self, node: int) -> None:
        self._loop.call_soon_threadsafe(self._wake, node)

    def _wake(self, node: int) -> None:
        future = self._waiting.get(node)
        if future is not None and not future.done():
            future.set_result(None)


class _AbortedError(Exception):
    """A call is refused."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code, self.details = code, details


class _Context:
    """As much of a call's context as Flower's servicer and interceptors use."""

    def __init__(self) -> None:
        self._code: grpc.StatusCode | None = None

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        self._code = code
        raise _AbortedError(code, details)

    def code(self) -> grpc.StatusCode | None:
        return self._code

    def set_trailing_metadata(self, metadata: object) -> None:
        """Leave out what nobody reads."""


@dataclass(frozen=True)
class _Details:
    """What interceptors are told about a call."""

    method: str
    invocation_metadata: Any


class _Calls:
    """Method handlers behind Flower's interceptors, which are told that all are Flower's."""

    def __init__(
        self,
        services: Mapping[str, Mapping[str, Any]],
        interceptors: Collection[grpc.ServerInterceptor],
    ) -> None:
        self.services = services
        self._chains: dict[str, Callable[[Any], Any]] = {}
        every = [call for handlers in services.values() for call in handlers.items()]
        for name, handler in every:
            chain: Callable[[Any], Any] = partial(_constant, handler)
            for interceptor in reversed(list(interceptors)):
                chain = partial(interceptor.intercept_service, chain)
            self._chains[name] = chain

    def answer(self, name: str, request: Any, metadata: Any) -> Any:
        """Answer a call; raise `_AbortedError` if it is refused."""
        handler = self._chains[name](_Details(f"/{_SERVICE}/{name}", metadata))
        return handler.unary_unary(request, _Context())


def _constant(value: object, _details: object) -> object:
    return value


class _Collector:
    """Takes the place of a gRPC server to which Flower adds its servicer."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Ignore what `add_registered_method_handlers` gets too."""

    def add_registered_method_handlers(self, _service: str, handlers: Mapping[str, Any]) -> None:
        self.handlers.update(handlers)


class _StateFactory:
    """Hands out one state."""

    def __init__(self, state: LinkState) -> None:
        self._state = state

    def state(self) -> LinkState:
        return self._state

    def store(self) -> Any:
        return self._state.object_store


class _Signatures(NodeAuthServerInterceptor):
    """Flower's check of signatures, made once for each signature: a device may use one again."""

    def __init__(self, factory: Any) -> None:
        super().__init__(factory)
        self._proven: dict[bytes, tuple[str, bytes, float]] = {}

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        metadata: dict[str, Any] = dict(details.invocation_metadata)
        key = metadata.get(PUBLIC_KEY_HEADER)
        proof = (metadata.get(TIMESTAMP_HEADER), metadata.get(SIGNATURE_HEADER))
        known = self._proven.get(key) if isinstance(key, bytes) else None
        if known and known[:2] == proof and time.monotonic() < known[2] + _PROVEN_SECONDS:
            return self._wrap_method_handler(continuation(details), cast(bytes, key))

        def passed(details: Any) -> Any:
            # Flower goes on only with a call whose signature is good. Keys of nobody are not kept.
            if self.state_factory.state().get_node_id_by_public_key(cast(bytes, key)) is None:
                return continuation(details)
            self._proven[cast(bytes, key)] = (*cast(tuple[str, bytes], proof), time.monotonic())
            return continuation(details)

        return super().intercept_service(passed, details)


@dataclass(frozen=True)
class _Sent:
    """A reply with its objects."""

    push: PushMessagesRequest
    contents: list[bytes]

    @property
    def node(self) -> Any:
        return self.push.node


def _read_sent(data: bytes) -> _Sent:
    head, *contents = parcels.split(data)
    return _Sent(PushMessagesRequest.FromString(head), contents)


class _Servicer(FleetServicer):
    """Flower's servicer, and the calls of Raceme's own devices.

    It takes from a node only what that node says in its own name.
    """

    def fetch(self, request: ConfirmMessageReceivedRequest, context: Any) -> bytes:
        """Hand out all objects of a message in one; nothing if they are too large for that."""
        state = cast(LinkState, self.state_factory.state())
        return parcels.join(state.contents(request.message_object_id))

    def send(self, request: _Sent, context: Any) -> PushMessagesResponse:
        """Take a reply with all its objects."""
        response = self.PushMessages(request.push, context)
        contents = {get_object_id(content): content for content in request.contents}
        state = self.state_factory.state()
        left = []
        for object_id in response.objects_to_push:
            run, session = request.push.messages_list[0].metadata.run_id, response.session_id
            if object_id not in contents or not state.store_object(
                run, session, object_id, contents[object_id]
            ):
                left.append(object_id)
        del response.objects_to_push[:]
        response.objects_to_push.extend(left)
        return cast(PushMessagesResponse, response)

    def PushMessages(self, request: Any, context: Any) -> Any:  # noqa: N802
        for message in request.messages_list:
            if message.metadata.src_node_id != request.node.node_id:
                context.abort(grpc.StatusCode.PERMISSION_DENIED, "a reply of another node")
        return super().PushMessages(request, context)


def _calls(state: LinkState, registered_only: bool) -> _Calls:
    factory = cast(Any, _StateFactory(state))
    collector = _Collector()
    servicer = _Servicer(factory, factory, registered_only)
    add_FleetServicer_to_server(servicer, collector)
    own = {
        parcels.FETCH: grpc.unary_unary_rpc_method_handler(
            servicer.fetch, ConfirmMessageReceivedRequest.FromString, bytes
        ),
        parcels.SEND: grpc.unary_unary_rpc_method_handler(
            servicer.send, _read_sent, PushMessagesResponse.SerializeToString
        ),
    }
    interceptors = [
        RpcErrorTranslationServerInterceptor(),
        _Signatures(factory),
        create_fleet_runtime_version_server_interceptor(),
    ]
    return _Calls({_SERVICE: collector.handlers, parcels.SERVICE: own}, interceptors)


def _patience(metadata: Any) -> float | None:
    """Return how many seconds a call may take; nothing if nothing is said about it."""
    for key, value in metadata:
        if key == WAIT_HEADER:
            try:
                return min(max(float(value), 0.0), LONGEST_WAIT)
            except ValueError:
                return None
    return None
