"""The Fleet API over HTTP, as SuperNodes of Flower 1.40 and later use it."""

from __future__ import annotations

import gzip
import logging
import re
import threading
import time
import tracemalloc
from base64 import b64decode, b64encode
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import httpx
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from google.protobuf.message import Message
from serving import Server, answer, fetch, light_device, number_of, round_trip, serving

from raceme.core.errors import UserError
from raceme.core.signals import StopSignal
from raceme.fleet.certificates import make_certificates, read_certificates
from raceme.fleet.device import OtherTransportError, StoppedError, join
from raceme.flower import fleet_protocol, fleet_server
from raceme.flower.fleet_client import Endpoint, knows_key
from raceme.flower.fleet_protocol import MEDIA_TYPE, Signer, generate_keys, path_of
from raceme.flower.link_state import LinkState


def post(server: Server, name: str, body: bytes, headers: dict[str, str]) -> httpx.Response:
    """Make a call over HTTP, without the headers that a device adds."""
    return httpx.post(
        f"http://{server.http}{path_of(name)}",
        content=body,
        headers={"content-type": MEDIA_TYPE, **headers},
        timeout=10,
    )


@pytest.mark.parametrize("where", ["GetRun", "RegisterNode"])
def test_a_body_that_says_it_is_compressed_is_not_unpacked(tmp_path: Path, where: str) -> None:
    bomb = gzip.compress(bytes(64 << 20))
    with serving(tmp_path) as server, light_device(server, transport="http") as link:
        signed = Signer(*generate_keys()).headers()
        tracemalloc.start()
        answered = post(server, where, bomb, {**signed, "content-encoding": "gzip"})
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert answered.status_code in (400, 401)
        assert most < 8 << 20
        round_trip(server, link, 1)


def test_a_server_that_answers_with_a_bomb_fills_no_device(tmp_path: Path) -> None:
    bomb = gzip.compress(bytes(64 << 20))

    class Bomber(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("content-type", MEDIA_TYPE)
            self.send_header("content-encoding", "gzip")
            self.send_header("content-length", str(len(bomb)))
            self.end_headers()
            self.wfile.write(bomb)

        def log_message(self, *_line: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Bomber) as bomber:
        threading.Thread(target=bomber.serve_forever, daemon=True).start()
        place = Endpoint(f"127.0.0.1:{bomber.server_port}", True, transport="http")
        tracemalloc.start()
        joining = join(place, generate_keys(), StopSignal(), register=True)
        with pytest.raises(UserError, match="is not a Fleet API"), joining:
            pass
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        bomber.shutdown()
    assert most < 8 << 20


def test_paths_are_those_of_flower() -> None:
    assert path_of("RegisterNode") == "/v1/fleet/register-node"
    assert path_of("SendNodeHeartbeat") == "/v1/fleet/send-node-heartbeat"
    assert path_of("GetFab") == "/v1/fleet/get-fab"


def test_a_message_and_its_reply_arrive_as_they_were_sent(tmp_path: Path) -> None:
    with serving(tmp_path) as server, light_device(server, transport="http") as link:
        sent = [server.push(link.node_id, number) for number in (7, 8)]
        for number in (7, 8):
            message = fetch(link)
            assert number_of(message) == number
            answer(link, message)
        replies = server.wait(*sent)
        assert [number_of(reply) for reply in replies] == [7, 8]
        assert (replies[0].content["arrays"].to_numpy_ndarrays()[0] == 7).all()
        assert len(server.state.objects) == 0
        assert link.receive() is None


def test_both_transports_serve_one_run(tmp_path: Path) -> None:
    with serving(tmp_path) as server, ExitStack() as stack:
        links = [
            stack.enter_context(light_device(server, transport=transport))
            for transport in ("grpc", "http")
        ]
        sent = [server.push(link.node_id, number) for number, link in enumerate(links)]
        for link in links:
            answer(link, fetch(link))
        replies = {reply.metadata.src_node_id: number_of(reply) for reply in server.wait(*sent)}
        replies |= {
            reply.metadata.src_node_id: number_of(reply) for reply in server.grid.wait(sent, 0.0)
        }
        assert replies == {links[0].node_id: 0, links[1].node_id: 1}
        assert sorted(server.state.online()) == sorted(link.node_id for link in links)
    assert server.state.online() == []


def test_a_registered_key_is_needed_and_enough(tmp_path: Path) -> None:
    known, other = generate_keys(), generate_keys()
    with serving(tmp_path, registered=lambda: {public_key_to_bytes(known[1]): "kitchen"}) as server:
        endpoint = Endpoint(server.http, insecure=True, transport="http")
        assert knows_key(endpoint, known) is True
        assert knows_key(endpoint, other) is False
        with light_device(server, known, "http") as link:
            round_trip(server, link, 3)
        with (
            pytest.raises(UserError, match="takes only devices with a registered key"),
            join(endpoint, other, StopSignal(), register=True),
        ):
            pass


def test_tls_with_the_fleets_authority(tmp_path: Path) -> None:
    make_certificates(tmp_path / "certs", ["localhost", "127.0.0.1"], [])
    certificates = read_certificates(tmp_path / "certs")
    with serving(tmp_path, certificates=certificates) as server:
        endpoint = Endpoint(server.http, False, certificates.authority, "http")
        keys = generate_keys()
        with join(endpoint, keys, StopSignal(), register=True) as link:
            round_trip(server, link, 5)
        # A server of another authority is refused.
        make_certificates(tmp_path / "others", ["localhost", "127.0.0.1"], [])
        authority = read_certificates(tmp_path / "others").authority
        other = Endpoint(server.http, False, authority, "http")
        with (
            pytest.raises(UserError, match="does not come from the authority"),
            join(other, keys, StopSignal(), register=True),
        ):
            pass
        # gRPC recognises a server that speaks HTTP/1.1 over TLS.
        with (
            pytest.raises(OtherTransportError),
            join(
                Endpoint(server.http, False, certificates.authority, "grpc"),
                keys,
                StopSignal(),
                register=True,
            ),
        ):
            pass


def signed(ago: float = 0.0, **others: str) -> tuple[dict[str, str], bytes]:
    """Return the headers of a call that was signed this many seconds ago, and the key."""
    private, public = generate_keys()
    timestamp = (datetime.now(UTC) - timedelta(seconds=ago)).isoformat()
    signature = private.sign(timestamp.encode(), ec.ECDSA(hashes.SHA256()))
    headers = {
        "flwr-public-key": b64encode(public_key_to_bytes(public)).decode(),
        "flwr-timestamp": timestamp,
        "flwr-signature": b64encode(signature).decode(),
        **others,
    }
    return headers, public_key_to_bytes(public)


def call(
    server: Server, transport: str, name: str, request: Message, headers: dict[str, str]
) -> tuple[int, str]:
    """Call over HTTP or gRPC; return HTTP's status of the answer, and the reason of a refusal."""
    body = request.SerializeToString()
    if transport == "http":
        response = post(server, name, body, headers)
        return response.status_code, response.json()["detail"] if response.is_error else ""
    binary = {"flwr-public-key", "flwr-signature"}
    metadata = [
        (f"{key}-bin", b64decode(value)) if key in binary else (key, value)
        for key, value in headers.items()
    ]
    with grpc.insecure_channel(server.address) as channel:
        try:
            channel.unary_unary(f"/flwr.proto.Fleet/{name}")(body, metadata=metadata, timeout=10)
        except grpc.RpcError as error:
            return fleet_server.HTTP_STATUS[error.code()], error.details()
    return 200, ""


TRANSPORTS = pytest.mark.parametrize("transport", ["http", "grpc"])


@TRANSPORTS
@pytest.mark.parametrize(("ago", "side"), [(320.0, "ago"), (-20.0, "ahead")])
def test_a_clock_that_differs_is_refused(
    tmp_path: Path, transport: str, ago: float, side: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "raceme")
    with serving(tmp_path) as server:
        headers, key = signed(ago)
        request = ActivateNodeRequest(public_key=key, heartbeat_interval=30)
        before = time.time()
        answers = [call(server, transport, "ActivateNode", request, headers) for _ in range(2)]
        passed = time.time() - before
    # At 401 a SuperNode ends silently; at 412 it prints the reason.
    assert [status for status, _ in answers] == [412, 412]
    (line,) = caplog.messages
    assert line.startswith("A node is refused: ")
    for said in (answers[0][1], line):
        found = re.search(r"signed (\d+) s (\w+)", said)
        assert found is not None
        assert found[2] == side
        # The call takes a while on a busy machine.
        assert abs(int(found[1]) - abs(ago)) <= passed + 1


@TRANSPORTS
def test_a_recorded_signature_is_of_no_use_to_another_node_or_later(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signatures cover the time only: Flower permits their use for five minutes."""
    recorded, owner = signed()
    forged, thief = signed()
    with serving(tmp_path) as server:
        nodes = [server.state.register(public_key) for public_key in (owner, thief)]
        pulls = [PullMessagesRequest(node=Node(node_id=node)) for node in nodes]

        def replay(pull: PullMessagesRequest, headers: dict[str, str]) -> tuple[int, str]:
            return call(server, transport, "PullMessages", pull, headers)

        assert replay(pulls[0], recorded) == (200, "")
        assert replay(pulls[1], recorded) == (401, "Invalid node ID")
        for name in ("flwr-public-key", "flwr-timestamp"):
            mixed = {**recorded, name: forged[name]}
            assert replay(pulls[0], mixed) == (401, "Invalid signature")
        # Repeated use does not prolong the validity.
        seconds = [50, 100, 150, 200, 250, 295, 310]
        answers = []
        for later in seconds:
            monkeypatch.setattr(fleet_protocol, "time", SkewedTime(later))
            monkeypatch.setattr(fleet_protocol, "datetime", SkewedTime(later))
            answers.append(replay(pulls[0], recorded)[0])
        assert answers == [200] * 6 + [412]


@dataclass
class SkewedTime:
    """This machine's clocks, some seconds ahead."""

    seconds: float

    def monotonic(self) -> float:
        return time.monotonic() + self.seconds

    def now(self, zone: tzinfo) -> datetime:
        return datetime.now(zone) + timedelta(seconds=self.seconds)

    def fromisoformat(self, text: str) -> datetime:
        return datetime.fromisoformat(text)


@TRANSPORTS
@pytest.mark.parametrize("release", ["1.38.1", "1.99.0", "2.0", "new", ""])
def test_a_release_that_is_not_supported_is_told_which_are(
    tmp_path: Path, transport: str, release: str
) -> None:
    headers, key = signed(**{"flwr-package-version": release})
    request = ActivateNodeRequest(public_key=key, heartbeat_interval=30)
    with serving(tmp_path) as server:
        status, details = call(server, transport, "ActivateNode", request, headers)
    assert status == 412
    assert details.endswith("supported are 1.39 to 1.43")


@pytest.mark.parametrize(
    "private",
    [rsa.generate_private_key(65537, 2048), ed25519.Ed25519PrivateKey.generate()],
    ids=["rsa", "ed25519"],
)
def test_keys_of_another_kind_are_refused(
    tmp_path: Path, private: rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey
) -> None:
    headers, _ = signed()
    pem = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    headers["flwr-public-key"] = b64encode(pem).decode()
    with serving(tmp_path) as server:
        response = post(server, "ActivateNode", b"", headers)
    assert (response.status_code, response.json()) == (401, {"detail": "Invalid signature"})


def test_calls_that_are_not_a_nodes_own_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as server, light_device(server, transport="http") as link:
        stranger = Signer(*generate_keys())
        pull = PullMessagesRequest(node=Node(node_id=link.node_id)).SerializeToString()
        responses = [
            post(server, "PullMessages", pull, {}),
            post(server, "PullMessages", pull, {"flwr-public-key": "?", "flwr-signature": "?"}),
            post(server, "PullMessages", pull, stranger.headers()),
            post(server, "ActivateNode", b"\xff\xff", stranger.headers()),
            post(server, "ActivateNode", b"", {**stranger.headers(), "content-type": "text/html"}),
        ]
        assert [response.status_code for response in responses] == [401, 401, 401, 400, 400]
        assert httpx.get(f"http://{server.http}{path_of('PullMessages')}").status_code == 405
        assert httpx.post(f"http://{server.http}/v1/fleet/other").status_code == 404


def test_a_body_over_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinkState, "largest", 1000)
    keys = generate_keys()
    signer = Signer(*keys)
    with serving(tmp_path, registered=lambda: {signer.public_bytes: "kitchen"}) as server:
        response = post(server, "PushObject", bytes(1001), signer.headers())
        assert response.status_code == 413
        assert response.json() == {"detail": "Received message larger than max (1001 vs. 1000)"}


def test_over_grpc_a_call_that_is_not_signed_is_refused_before_its_body_is_read(
    tmp_path: Path,
) -> None:
    with serving(tmp_path) as server, grpc.insecure_channel(server.address) as channel:
        ended = threading.Event()

        def endless() -> object:
            # The first part is never sent, and the server must answer nevertheless.
            ended.wait(20)
            return iter(())

        def parts() -> object:
            endless()
            yield b""

        call = channel.stream_unary("/flwr.proto.Fleet/PushObject")
        with pytest.raises(grpc.RpcError) as refused:
            call(parts(), timeout=10)
        ended.set()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "Missing authentication metadata" in refused.value.details()


def test_http_spoken_to_the_grpc_port_and_the_reverse_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = generate_keys()
    with serving(tmp_path) as server:
        with (
            pytest.raises(OtherTransportError),
            join(Endpoint(server.http, True), keys, StopSignal(), register=True),
        ):
            pass
        stop = StopSignal()
        threading.Timer(1.0, stop.set).start()
        caplog.set_level(logging.WARNING, "raceme")
        with (
            pytest.raises(StoppedError),
            join(Endpoint(server.address, True, None, "http"), keys, stop, register=True),
        ):
            pass
    assert "perhaps it speaks gRPC: then use --transport grpc" in caplog.text


def test_the_table_of_calls_is_flowers() -> None:
    """Every call of Flower's own service description is in the table, with its messages."""
    service = fleet_protocol.fleet_pb2.DESCRIPTOR.services_by_name["Fleet"]
    own = {
        name: (call.request.DESCRIPTOR, call.response.DESCRIPTOR)
        for name, call in fleet_protocol.CALLS.items()
    }
    flowers = {
        method.name: (method.input_type, method.output_type)
        for method in service.methods
        if method.name in own
    }
    assert own == flowers
