"""Raceme's devices and Flower's SuperNodes at one server: each gets the format that it reads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from log_lines import lines_with
from serving import Server, answer, fetch, light_device, number_of, round_trip, serving

from raceme.core.errors import UserError
from raceme.flower import fleet_client as direct
from raceme.flower import fleet_protocol as wire
from raceme.flower import link_state as message_state
from raceme.flower.fleet_protocol import Greeting
from raceme.flower.link_state import MessageCache
from raceme.flower.messages import NODE_UNAVAILABLE, SERVER_NODE_ID, encode, identify_process


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as opened:
        yield opened


def model(seed: int) -> RecordDict:
    chance = np.random.default_rng(seed)
    shapes = [(3, 4), (4,), (), (2, 0), (5, 1, 2)]
    arrays = [chance.standard_normal(shape).astype(np.float32) for shape in shapes]
    arrays.append(np.array([np.nan, -0.0, np.inf], np.float32))
    return RecordDict({"arrays": ArrayRecord(arrays), "config": ConfigRecord({"number": seed})})


def sent_and_answered(server: Server, *, seed: int = 3) -> tuple[str, str, int]:
    """Return the hashes of the received and the returned model, and the number of objects."""
    with light_device(server) as link:
        identify_process(server.state.run_id, SERVER_NODE_ID)
        (key,) = server.grid.push_messages([Message(model(seed), link.node_id, "train", ttl=60.0)])
        objects = len(server.state.objects)
        message = fetch(link)
        answer(link, message)
        (reply,) = server.wait(key)
        return message.content.object_id, reply.content.object_id, objects


def test_negotiated_and_stock_arrays_are_the_same_bit_for_bit(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sent_and_answered(server)
    # Larger than one call: sent as Flower's objects, with the model in one array.
    with monkeypatch.context() as patch:
        patch.setattr(message_state, "LARGEST", 10)
        patch.setattr(direct, "LARGEST", 10)
        large = sent_and_answered(server)
    with monkeypatch.context() as patch:
        patch.setattr(direct, "_greeted", lambda *_: None)
        stock = sent_and_answered(server)
    expected = model(3).object_id
    assert {*whole[:2], *large[:2], *stock[:2]} == {expected}
    # None; message, records, one array and its data; each array and its data.
    assert (whole[2], large[2], stock[2]) == (0, 6, 16)


def test_both_kinds_of_devices_work_side_by_side(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with light_device(server) as own, monkeypatch.context() as patch:
        patch.setattr(direct, "_greeted", lambda *_: None)
        with light_device(server) as stock:
            keys = [server.push(link.node_id, i) for i, link in enumerate((own, stock))]
            for link in (stock, own):
                answer(link, fetch(link))
            replies = [server.wait(key)[0] for key in keys]
            assert [number_of(reply) for reply in replies] == [0, 1]


@contextmanager
def greets(monkeypatch: pytest.MonkeyPatch, greeting: Greeting) -> Iterator[None]:
    """Let devices, also those in this process, greet like another version."""

    def greeted(transport: direct.Transport, calls: direct.Calls, _device: str) -> Greeting:
        answer = calls.invoke(transport.greet, greeting.to_bytes())
        return Greeting.from_bytes(answer)

    with monkeypatch.context() as patch:
        patch.setattr(direct, "_greeted", greeted)
        yield


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_a_device_of_another_protocol_is_told_the_command_that_updates_it(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    transport: str,
) -> None:
    other = Greeting(wire.PROTOCOL + 1, "9.9")
    with (
        greets(monkeypatch, other),
        pytest.raises(UserError) as refused,
        light_device(server, transport=transport),
    ):
        pass
    (line,) = str(refused.value).splitlines()
    assert "this device has raceme 9.9 (protocol 3)" in line
    assert f"pip install raceme=={wire.own_greeting().version}" in line
    assert "A node is refused: this device has raceme 9.9 (protocol 3)" in caplog.text
    assert server.state.online() == []


@pytest.mark.parametrize("transport", ["grpc", "http"])
@pytest.mark.parametrize(
    ("version", "digest", "said"),
    [
        ("0.1.9", "", "has raceme 0.1.9, this is "),
        (None, "abc", "but with different code"),
        (None, "", ""),
    ],
)
def test_a_device_of_another_version_with_the_protocol_is_welcome_and_both_sides_say_it(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    transport: str,
    version: str | None,
    digest: str,
    said: str,
) -> None:
    own = wire.own_greeting()
    other = Greeting(wire.PROTOCOL, version or own.version, digest)
    with greets(monkeypatch, other), light_device(server, transport=transport) as link:
        round_trip(server, link, 1)
        assert link.server == own
        assert bool(link.server.difference(other)) == bool(said)
    found = lines_with(caplog, f"The device on node {link.node_id} has")
    assert {line["device"] for line in found} == ({f"node {link.node_id}"} if said else set())
    assert said in caplog.text


def test_a_greeting_without_newer_fields_is_read() -> None:
    assert Greeting.from_bytes(b'{"protocol": 2, "version": "0.2.0", "later": 1}\0') == Greeting(
        2, "0.2.0"
    )


@pytest.mark.parametrize(
    ("method", "request_bytes", "code"),
    [
        (wire.GREET, b"[]", grpc.StatusCode.INVALID_ARGUMENT),
        (wire.GREET, b'{"protocol": "1", "version": 1}', grpc.StatusCode.INVALID_ARGUMENT),
        (wire.NEXT, b"", grpc.StatusCode.INVALID_ARGUMENT),
        (wire.SEND, b"too short", grpc.StatusCode.INVALID_ARGUMENT),
        (wire.NEXT, wire.NextRequest(5).to_bytes(), grpc.StatusCode.UNAUTHENTICATED),
        (wire.SEND, wire.SendRequest(5, "a", b"").to_bytes(), grpc.StatusCode.UNAUTHENTICATED),
    ],
)
def test_invalid_calls_are_refused(
    server: Server, method: str, request_bytes: bytes, code: grpc.StatusCode
) -> None:
    with light_device(server) as link:
        own = link._direct
        assert own is not None
        greet = link._transport.greet
        call = {wire.GREET: greet, wire.NEXT: own._next, wire.SEND: own._send}[method]
        with pytest.raises(grpc.RpcError) as refused:
            call(request_bytes)
        assert refused.value.code() is code
    # Unsigned calls are refused too.
    with grpc.insecure_channel(server.address) as channel:
        unsigned = channel.unary_unary(f"/{wire.SERVICE}/{method}")
        with pytest.raises(grpc.RpcError) as refused:
            unsigned(request_bytes)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_reply_that_cannot_be_read_is_an_error_reply(server: Server) -> None:
    with light_device(server) as link:
        key = server.push(link.node_id, 1)
        fetch(link)
        assert server.state.accept(link.node_id, key, b"\xff\xff")
        (reply,) = server.wait(key)
        assert "cannot be read" in reply.error.reason
        # A reply that names another node as its source is not accepted.
        other, key = (server.push(link.node_id, number) for number in (2, 3))
        for _ in range(2):
            message = fetch(link)
        identify_process(message.metadata.run_id, link.node_id)
        reply = Message(message.content, reply_to=message)
        assert server.state.accept(link.node_id, other, encode(reply))
        (reply,) = server.wait(other)
        assert "differs from its announcement" in reply.error.reason
        assert key


def test_messages_without_a_copy_are_reported_as_lost(server: Server) -> None:
    with light_device(server) as link:
        server.state._cache = MessageCache(most_bytes=0)
        key = server.push(link.node_id, 1)
        # The reply was lost on the way, and the cache does not hold the message any more.
        assert server.state.next_for(link.node_id, "") is not None
        assert link.receive() is None
        (reply,) = server.wait(key)
        assert reply.error.code == NODE_UNAVAILABLE


def test_a_supernode_with_the_key_of_a_device_gets_what_it_can_read(
    server: Server,
) -> None:
    with light_device(server) as link:
        waiting = server.push(link.node_id, 1)
        server.state.deactivate(link.node_id)
        # This device has not greeted.
        assert server.state.activate(link.node_id, 30.0)
        (reply,) = server.wait(waiting)
        assert reply.error.code == NODE_UNAVAILABLE
        assert server.state.next_head(link.node_id) is None
        again = server.push(link.node_id, 2)
        assert again in server.state.objects


@pytest.mark.parametrize("hours", [5, -5])
def test_a_clock_that_is_set_sends_nobody_offline_and_loses_no_message(
    server: Server, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    with light_device(server) as link:
        key = server.push(link.node_id, 1, ttl=600.0)
        message = fetch(link)
        jump = timedelta(hours=hours)

        def wall() -> float:
            return time.time() + jump.total_seconds()

        # Not `time.time` itself, because the device is in the same process.
        clock = SimpleNamespace(time=wall, monotonic=time.monotonic)
        clock.strftime, clock.gmtime = time.strftime, time.gmtime
        monkeypatch.setattr(message_state, "time", clock)
        monkeypatch.setattr(server.state._skew, "_wall", wall)
        server.state._checked_at = 0.0
        assert server.state.online() == [link.node_id]
        assert server.grid.pull_messages([key]) == []
        answer(link, message)
        assert number_of(server.wait(key)[0]) == 1
