"""Strangers and devices at the port of the devices: calls over gRPC and HTTP."""

from __future__ import annotations

import gc
import json
import random
import socket
import subprocess
import sys
import tracemalloc
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import grpc
import pytest
from flwr.app import Message, RecordDict
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from serving import Server, answer, fetch, light_device, serving

from raceme.flower.fleet_client import Endpoint, Link, inflatable, signed_channel
from raceme.flower.fleet_protocol import (
    MEDIA_TYPE,
    SEND,
    SERVICE,
    Keys,
    SendRequest,
    Signer,
    generate_keys,
    path_of,
)
from raceme.flower.messages import encode, identify_process

SUBJECTS = ("silence", "bombs", "uploads", "answers", "replays", "registrations", "clocks")
_Code = grpc.StatusCode
_MIB = 1 << 20
_LIMIT = 4 * _MIB
_FOREIGN = _Code.UNAUTHENTICATED, _Code.PERMISSION_DENIED
_PEER = """
import base64, grpc, json, sys
told = json.loads(sys.stdin.read())
signed = [(name, base64.b64decode(value)) if name.endswith("-bin") else (name, value)
          for name, value in told["metadata"]]
options = [("grpc.max_send_message_length", -1)]
with grpc.insecure_channel(told["address"], options) as channel:
    call = channel.unary_unary(told["path"])
    how = grpc.Compression.Gzip if told["gzip"] else grpc.Compression.NoCompression
    try:
        call(bytes(told["size"]), metadata=signed, compression=how, timeout=100)
        print("OK")
    except grpc.RpcError as error:
        print(error.code().name)
"""
"""A peer with its own memory, which sends this many bytes in a call."""


def attack(subject: str, rng: random.Random, folder: Path) -> None:
    """Play a case of a subject; afterwards a device must still be served."""
    globals()[f"_{subject}"](rng, folder)


@contextmanager
def _fleet(folder: Path, *keys: Keys) -> Iterator[tuple[Server, list[Link]]]:
    """Serve registered devices, which are online."""
    names = {public_key_to_bytes(one[1]): f"device-{n}" for n, one in enumerate(keys)}
    with ExitStack() as stack:
        server = stack.enter_context(serving(folder, registered=lambda: names, largest=_LIMIT))
        yield server, [stack.enter_context(light_device(server, one)) for one in keys]


def _is_answered(server: Server, link: Link) -> None:
    """Assert that a device gets a message, and the server its answer."""
    sent = server.push(link.node_id, 7)
    answer(link, fetch(link))
    _has_come(server, sent)


def _has_come(server: Server, sent: str) -> None:
    (reply,) = server.wait(sent)
    assert not reply.has_error(), reply.error
    assert reply.content["config"]["number"] == 7
    server.state.forget([sent])


def _refused(call: Callable[[], object], *codes: grpc.StatusCode) -> str:
    """Assert that a call is refused with one of these codes; return the reason."""
    with pytest.raises(grpc.RpcError) as refused:
        call()
    assert refused.value.code() in codes, refused.value
    return str(refused.value.details())


@contextmanager
def _little_memory(most: int) -> Iterator[None]:
    """Assert that the memory of this process, the server, grows by at most this many bytes."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

    gc.collect()
    # Resets the peak of memory.
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    yield
    grown = status("VmHWM") - before
    assert grown < most, f"{grown / _MIB:.0f} MiB"


def _silence(rng: random.Random, folder: Path) -> None:
    """500 connections that send nothing, or begin a call and never end it."""
    begun = (b"", b"P", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\nHost: ", b"\0" * 9)
    with _fleet(folder, generate_keys()) as (server, (link,)), ExitStack() as stack:
        for _ in range(500):
            host, _, port = rng.choice((server.address, server.http)).rpartition(":")
            silent = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            with suppress(ConnectionError):
                silent.sendall(rng.choice(begun))
        _is_answered(server, link)


def _send_bytes(address: str, path: str, size: int, gzip: bool, signer: Signer | None) -> str:
    """Send a call with a number of zeros from another process; return the status."""
    metadata = [] if signer is None else signer.metadata()
    told = [
        (name, b64encode(value).decode() if isinstance(value, bytes) else value)
        for name, value in metadata
    ]
    asked = {"address": address, "path": path, "size": size, "gzip": gzip, "metadata": told}
    child = subprocess.run(
        [sys.executable, "-c", _PEER],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return child.stdout.strip()


def _paths(rng: random.Random) -> str:
    flowers = rng.choice(("PushObject", "PushMessages", "ActivateNode", "SendNodeHeartbeat"))
    return rng.choice((f"/{SERVICE}/{SEND}", f"/{SERVICE}/Greet", f"/flwr.proto.Fleet/{flowers}"))


def _bombs(rng: random.Random, folder: Path) -> None:
    """A quarter of a megabyte that unpacks to 256, from a stranger and a registered device."""
    keys = generate_keys()
    with _fleet(folder, keys) as (server, (link,)):
        for signer in (None, Signer(*generate_keys()), Signer(*keys)):
            with _little_memory(40 * _MIB):
                said = _send_bytes(server.address, _paths(rng), 256 * _MIB, True, signer)
            assert said in ("UNAUTHENTICATED", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED"), said
        _is_answered(server, link)


def _uploads(rng: random.Random, folder: Path) -> None:
    """A gigabyte over gRPC and over HTTP, from a stranger and a registered device."""
    keys = generate_keys()
    with _fleet(folder, keys) as (server, (link,)):
        signer = rng.choice((None, Signer(*keys)))
        with _little_memory(100 * _MIB):
            said = _send_bytes(server.address, _paths(rng), 1 << 30, False, signer)
        assert said in ("UNAUTHENTICATED", "RESOURCE_EXHAUSTED"), said
        for other in (None, Signer(*keys)):
            with _little_memory(40 * _MIB):
                said = _post_gigabyte(server.http, other, rng.random() < 0.5)
            assert said in ("", "400", "401", "413"), said
        _is_answered(server, link)


def _post_gigabyte(address: str, signer: Signer | None, in_chunks: bool) -> str:
    """Post up to a gigabyte while the server reads; return the status, if there is one."""
    host, _, port = address.rpartition(":")
    headers = {"Host": address, "Content-Type": MEDIA_TYPE}
    headers |= {"Transfer-Encoding": "chunked"} if in_chunks else {"Content-Length": str(1 << 30)}
    headers |= {} if signer is None else signer.headers()
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    part = bytes(_MIB)
    if in_chunks:
        part = b"%x\r\n" % len(part) + part + b"\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as talk:
        talk.sendall(f"POST {path_of('PushObject')} HTTP/1.1\r\n{head}\r\n".encode())
        sent = 0
        with suppress(ConnectionError, TimeoutError):
            while sent < 1 << 30:
                talk.sendall(part)
                sent += _MIB
        assert sent < 1 << 29, "all of it was read"
        with suppress(ConnectionError, TimeoutError):
            return talk.recv(100).decode("latin-1").split(" ")[1]
    return ""


def _answers(rng: random.Random, folder: Path) -> None:
    """A registered device forges the answer to another device's message in several ways."""
    keys, own = generate_keys(), generate_keys()
    names = {public_key_to_bytes(one[1]): name for one, name in ((keys, "thief"), (own, "owner"))}
    with (
        serving(folder, registered=lambda: names) as server,
        light_device(server, own) as owner,
        signed_channel(Endpoint(server.address, insecure=True), keys) as channel,
    ):
        send, stub = channel.unary_unary(f"/{SERVICE}/{SEND}"), FleetStub(channel)
        request = ActivateNodeRequest(public_key=public_key_to_bytes(keys[1]))
        request.heartbeat_interval = 30
        thief = stub.ActivateNode(request).node_id
        sent = server.push(owner.node_id, 7)
        message = fetch(owner)
        for node in rng.sample([thief, owner.node_id, 0, 2**63], 4):
            identify_process(message.metadata.run_id, node)
            reply = Message(message.content, reply_to=message)
            body = SendRequest(thief, sent, encode(reply)).to_bytes()
            _refused(partial(send, body), _Code.PERMISSION_DENIED)
            if node != thief:
                body = SendRequest(node, sent, encode(reply)).to_bytes()
                _refused(partial(send, body), *_FOREIGN)
            head = message_to_proto(Message(RecordDict(), reply_to=message))
            tree = inflatable.get_object_tree(reply)
            head.metadata.src_node_id, head.metadata.message_id = node, tree.object_id
            foreign = PushMessagesRequest(
                node=Node(node_id=thief), messages_list=[head], message_object_trees=[tree]
            )
            if node != thief:
                _refused(partial(stub.PushMessages, foreign), *_FOREIGN)
            else:
                # As in Flower, the call succeeds, and the answer is ignored.
                stub.PushMessages(foreign)
        assert not list(server.grid.pull_messages([sent]))
        answer(owner, message)
        _has_come(server, sent)
        # A second answer to the same message is ignored.
        with suppress(grpc.RpcError):
            answer(owner, message)
        assert not list(server.grid.pull_messages([sent]))


def _replays(rng: random.Random, folder: Path) -> None:
    """Another device replays the calls with which a device joined."""
    keys, other = generate_keys(), generate_keys()
    heard = dict(Signer(*keys).metadata())
    own, others = (public_key_to_bytes(one[1]) for one in (keys, other))
    forged = [(k, others if k.startswith("flwr-public-key") else v) for k, v in heard.items()]
    heard_again = list(heard.items())
    with serving(folder) as server, grpc.insecure_channel(server.address) as channel:
        stub = FleetStub(channel)
        register = RegisterNodeFleetRequest(public_key=own)
        node = stub.RegisterNode(register, metadata=heard_again).node_id
        with light_device(server, keys) as link:
            assert link.node_id == node
            again = partial(stub.RegisterNode, register, metadata=heard_again)
            for _ in range(rng.randint(1, 100)):
                _refused(again, _Code.FAILED_PRECONDITION)
            # The recorded signature is invalid with another key or for another node.
            mine = RegisterNodeFleetRequest(public_key=others)
            for metadata in (heard_again, forged):
                _refused(partial(stub.RegisterNode, mine, metadata=metadata), *_FOREIGN)
            wanted = PullMessagesRequest(node=Node(node_id=node))
            _refused(partial(stub.PullMessages, wanted, metadata=forged), *_FOREIGN)
            elsewhere = PullMessagesRequest(node=Node(node_id=rng.getrandbits(62)))
            _refused(partial(stub.PullMessages, elsewhere, metadata=heard_again), *_FOREIGN)
            assert list(server.state.nodes) == [node]
            _is_answered(server, link)


def _registrations(_rng: random.Random, folder: Path) -> None:
    """One peer registers 2,000 nodes that never connect."""
    with serving(folder) as server, grpc.insecure_channel(server.address) as channel:
        stub, node = FleetStub(channel), 0
        counts, sizes = [], []
        tracemalloc.start()
        try:
            for _ in range(4):
                for _ in range(500):
                    keys = generate_keys()
                    request = RegisterNodeFleetRequest(public_key=public_key_to_bytes(keys[1]))
                    signed = Signer(*keys).metadata()
                    node = stub.RegisterNode(request, metadata=signed).node_id
                gc.collect()
                counts.append(len(server.state.nodes))
                sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert node in server.state.nodes
        assert max(counts) < 1100, counts
        assert sizes[-1] - sizes[-2] < _MIB // 4, sizes
        with light_device(server) as link:
            _is_answered(server, link)


def _clocks(rng: random.Random, folder: Path) -> None:
    """Calls of a device whose clock is up to a day off."""
    keys = generate_keys()
    with _fleet(folder, keys) as (server, (link,)):
        with grpc.insecure_channel(server.address) as channel:
            for sign in (1, -1):
                off = timedelta(seconds=sign * rng.uniform(3600, 86_400))
                timestamp = (datetime.now(UTC) + off).isoformat()
                metadata = dict(Signer(*keys).metadata())
                metadata["flwr-timestamp"] = timestamp
                metadata["flwr-signature-bin"] = sign_message(keys[0], timestamp.encode())
                request = ActivateNodeRequest(public_key=metadata["flwr-public-key-bin"])
                request.heartbeat_interval = 30
                activate = partial(FleetStub(channel).ActivateNode, request)
                said = _refused(
                    partial(activate, metadata=list(metadata.items())), _Code.FAILED_PRECONDITION
                )
                assert "Set the device's clock" in said
        _is_answered(server, link)
