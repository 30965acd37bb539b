"""Flower's Fleet API over gRPC, served from this process.

Servicer, checks of signatures and of versions are Flower's own. They are called from an event loop
instead of a thousand threads, so that a device may wait at the server until there is work for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, cast

import grpc
from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesResponse
from flwr.proto.fleet_pb2_grpc import add_FleetServicer_to_server
from flwr.server.superlink.fleet.grpc_rere.fleet_servicer import FleetServicer
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import (
    NodeAuthServerInterceptor,
)
from flwr.supercore.grpc import GRPC_MAX_MESSAGE_LENGTH
from flwr.supercore.interceptors import (
    RpcErrorTranslationServerInterceptor,
    create_fleet_runtime_version_server_interceptor,
)

from raceme import __version__
from raceme.flower import fleet_client as wire
from raceme.flower.fleet_client import Certificates
from raceme.flower.link_state import LinkState
from raceme.flower.messages import encode, join

log = logging.getLogger("raceme.serve")

_SERVICE = "flwr.proto.Fleet"
_ACTIVATE = "ActivateNode"
_START_SECONDS = 30.0
_END_SECONDS = 2.0
_FOREIGN_REPLY = "a reply of another node"
_PROVEN_SECONDS = 60.0
"""How long a signature that was checked counts as such. Flower accepts one for five minutes."""

_OPTIONS = [
    ("grpc.max_send_message_length", GRPC_MAX_MESSAGE_LENGTH),
    ("grpc.max_receive_message_length", GRPC_MAX_MESSAGE_LENGTH),
    ("grpc.keepalive_time_ms", 210_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Calls wait for their turn as long as devices do, and are not cancelled after 30 s.
    ("grpc.server_max_unrequested_time_in_server", 120),
    # Nor are some turned away at random when more than a thousand come at once.
    ("grpc.server.max_pending_requests", 10_000),
    ("grpc.server.max_pending_requests_hard_limit", 20_000),
    # Two servers on one port would each get some of the devices.
    ("grpc.so_reuseport", 0),
]


class PortInUseError(Exception):
    """The address cannot be listened at; the message says why, if that is known."""


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

    Attributes
    ----------
    on_call : Callable
        Called with a node that has made a call.

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
        self.on_call: Callable[[int], None] = lambda _node: None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._waiting: dict[int, asyncio.Future[bool]] = {}
        self._calls = _Calls(state, registered is not None)
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

    def __exit__(self, *_raised: object) -> None:
        self._await(self._stop())
        self._end_loop()

    def start(self) -> None:
        """Begin to answer; until then devices that connect have to wait."""
        assert self._server is not None
        self._admit()
        self._await(self._server.start())

    def answers(self, seconds: float) -> bool:
        """Return whether calls are answered, or would be, within some seconds."""
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
        flowers = {
            name: grpc.unary_unary_rpc_method_handler(
                partial(self._answer, name), call.request_deserializer, call.response_serializer
            )
            for name, call in self._calls.handlers.items()
        }
        answers = {wire.GREET: self._greet, wire.NEXT: self._next, wire.SEND: self._send}
        own = {
            name: grpc.unary_unary_rpc_method_handler(partial(self._answer_own, answer))
            for name, answer in answers.items()
        }
        for service, methods in ((_SERVICE, flowers), (wire.SERVICE, own)):
            handler = grpc.method_handlers_generic_handler(service, methods)
            server.add_generic_rpc_handlers((handler,))
        try:
            if self._certificates is None:
                server.add_insecure_port(self._address)
            else:
                pair = (self._certificates.key, self._certificates.certificate)
                credentials = grpc.ssl_server_credentials([pair], self._certificates.authority)
                server.add_secure_port(self._address, credentials)
        except RuntimeError as error:
            raise PortInUseError(str(error)) from None
        self._server = server

    def _admit(self) -> None:
        if self._registered is not None:
            self._state.admit(self._registered())

    async def _answer(self, name: str, request: Any, context: Any) -> Any:
        """Answer a call of Flower's."""
        if name == _ACTIVATE and self._registered is not None:
            self._look_for_key(request.public_key)
        try:
            response = self._calls.answer(name, request, context.invocation_metadata())
            if hasattr(request, "node"):
                self.on_call(request.node.node_id)
            return response
        except _AbortedError as aborted:
            await context.abort(aborted.code, aborted.details)

    async def _answer_own(
        self, answer: Callable[[bytes, bytes], Awaitable[bytes]], request: bytes, context: Any
    ) -> bytes:
        """Answer a call of Raceme's devices: with the public key that has signed it."""
        try:
            key = self._calls.signatures.key_of(context.invocation_metadata())
            return await answer(key, request)
        except _AbortedError as aborted:
            await context.abort(aborted.code, aborted.details)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return b""

    async def _greet(self, key: bytes, request: bytes) -> bytes:
        greeting, own = wire.Greeting.from_bytes(request), wire.Greeting(wire.PROTOCOL, __version__)
        if greeting != own:
            raise _AbortedError(grpc.StatusCode.FAILED_PRECONDITION, _other_version(greeting, own))
        if self._registered is not None:
            self._look_for_key(key)
        node = self._state.get_node_id_by_public_key(key)
        # Who is not registered learns that when it goes online.
        if node is not None:
            self._state.greet(node)
        return own.to_bytes()

    async def _next(self, key: bytes, request: bytes) -> bytes:
        """Hand out the next message; wait for it if there is none."""
        asked = wire.NextRequest.from_bytes(request)
        self._check(key, asked.node)
        found = self._state.next_for(asked.node, asked.have)
        if found is None and await self._wait(asked.node, min(asked.patience, wire.LONGEST_WAIT)):
            found = self._state.next_for(asked.node, asked.have)
        if found is None:
            return join([])
        message, tree = found
        if tree is None:
            return join([b"whole", encode(message)])
        head = PullMessagesResponse(
            messages_list=[message_to_proto(message)], message_object_trees=[tree]
        )
        return join([b"objects", head.SerializeToString()])

    async def _send(self, key: bytes, request: bytes) -> bytes:
        """Take a whole reply."""
        sent = wire.SendRequest.from_bytes(request)
        self._check(key, sent.node)
        if not self._state.accept(sent.node, sent.asked, sent.body):
            raise _AbortedError(grpc.StatusCode.PERMISSION_DENIED, _FOREIGN_REPLY)
        return b""

    def _check(self, key: bytes, node: int) -> None:
        """Refuse a node that says that it is another one."""
        if self._state.get_node_id_by_public_key(key) != node:
            # In Flower's words.
            raise _AbortedError(grpc.StatusCode.UNAUTHENTICATED, "Invalid node ID")
        self.on_call(node)

    def _look_for_key(self, key: bytes) -> None:
        """Look whether a node with an unknown key has been registered meanwhile."""
        if self._state.get_node_id_by_public_key(key) is None:
            self._admit()

    async def _wait(self, node: int, seconds: float) -> bool:
        """Wait until there is a message for a node; return whether there may be one."""
        if not seconds > 0:
            return False
        future = self._loop.create_future()
        former, self._waiting[node] = self._waiting.get(node), future
        if former is not None and not former.done():
            # Its answer would go nowhere: the node has called again.
            former.set_result(False)
        timer = self._loop.call_later(seconds, _give_up, future)
        try:
            there_is: bool = await future
            return there_is
        finally:
            timer.cancel()
            if self._waiting.get(node) is future:
                del self._waiting[node]

    def _on_work(self, node: int) -> None:
        self._loop.call_soon_threadsafe(self._wake, node)

    def _wake(self, node: int) -> None:
        future = self._waiting.get(node)
        if future is not None and not future.done():
            future.set_result(True)


def _give_up(future: asyncio.Future[bool]) -> None:
    if not future.done():
        future.set_result(False)


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


class _Details(NamedTuple):
    """What interceptors are told about a call."""

    method: str
    invocation_metadata: Any


class _Calls:
    """Flower's method handlers behind its interceptors; a server to what adds its servicer.

    Parameters
    ----------
    state : LinkState
        What the calls are about.
    registered_only : bool
        Nodes do not register themselves.

    Attributes
    ----------
    handlers : dict[str, RpcMethodHandler]
        Flower's own.
    signatures : _Signatures
        The check of signatures among the interceptors.
    """

    def __init__(self, state: LinkState, registered_only: bool) -> None:
        # What Flower takes factories of states for.
        factory: Any = SimpleNamespace(state=lambda: state, store=lambda: state.object_store)
        self.handlers: dict[str, Any] = {}
        self.signatures = _Signatures(factory)
        self._chains: dict[str, Callable[[Any], Any]] = {}
        add_FleetServicer_to_server(_Servicer(factory, factory, registered_only), self)

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Ignore what `add_registered_method_handlers` gets too."""

    def add_registered_method_handlers(self, _service: str, handlers: Mapping[str, Any]) -> None:
        """Put each handler behind all interceptors."""
        versions = create_fleet_runtime_version_server_interceptor()
        self.handlers.update(handlers)
        for name, handler in handlers.items():
            chain: Callable[[Any], Any] = partial(_constant, handler)
            for interceptor in (versions, self.signatures, RpcErrorTranslationServerInterceptor()):
                chain = partial(interceptor.intercept_service, chain)
            self._chains[name] = chain

    def answer(self, name: str, request: Any, metadata: Any) -> Any:
        """Answer a call; raise `_AbortedError` if it is refused."""
        handler = self._chains[name](_Details(f"/{_SERVICE}/{name}", metadata))
        return handler.unary_unary(request, _Context())


def _constant(value: object, _details: object) -> object:
    return value


class _Signatures(NodeAuthServerInterceptor):
    """Flower's check of signatures, made once for each signature: a device may use one again."""

    def __init__(self, factory: Any) -> None:
        super().__init__(factory)
        self._proven: dict[bytes, tuple[str, bytes, float]] = {}

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        key, refusal = self._checked(details)
        if refusal is not None:
            return refusal
        return self._wrap_method_handler(continuation(details), key)

    def key_of(self, metadata: Any) -> bytes:
        """Return the public key that has signed a call; raise `_AbortedError` if none has."""
        key, refusal = self._checked(_Details(f"/{_SERVICE}/", metadata))
        if refusal is not None:
            refusal.unary_unary(None, _Context())
        return key

    def _checked(self, details: Any) -> tuple[bytes, Any]:
        """Return the key, and what answers a call whose signature is not good."""
        metadata: dict[str, Any] = dict(details.invocation_metadata)
        key = cast(bytes, metadata.get(PUBLIC_KEY_HEADER))
        proof = (metadata.get(TIMESTAMP_HEADER), metadata.get(SIGNATURE_HEADER))
        known = self._proven.get(key)
        if known and known[:2] == proof and time.monotonic() < known[2] + _PROVEN_SECONDS:
            return key, None
        # Flower goes on only with a call whose signature is good.
        passed: list[object] = []
        refusal = super().intercept_service(partial(_noted, passed), details)
        if not passed:
            return b"", refusal
        # Keys of nobody are not kept.
        if self.state_factory.state().get_node_id_by_public_key(key) is not None:
            self._proven[key] = (*cast(tuple[str, bytes], proof), time.monotonic())
        return key, None


def _noted(passed: list[object], details: object) -> Any:
    passed.append(details)
    return grpc.unary_unary_rpc_method_handler(_constant)


class _Servicer(FleetServicer):
    """Flower's servicer, which takes from a node only what it says in its own name."""

    def PushMessages(self, request: Any, context: Any) -> Any:  # noqa: N802
        for message in request.messages_list:
            if message.metadata.src_node_id != request.node.node_id:
                context.abort(grpc.StatusCode.PERMISSION_DENIED, _FOREIGN_REPLY)
        return super().PushMessages(request, context)


def _other_version(device: wire.Greeting, server: wire.Greeting) -> str:
    return (
        f"this device has raceme {device.version[:40]} (protocol {device.protocol}), the "
        f"server {server.version} (protocol {server.protocol}): install the server's with "
        f"'pip install raceme=={server.version}', or from a checkout of that version, then start "
        "the device again"
    )
