"""TLS of a device: errors about unknown, wrong and expired certificates."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from raceme.core.errors import UserError
from raceme.core.signals import StopSignal
from raceme.fleet.certificates import make_certificates
from raceme.fleet.device import PatientCalls, StoppedError, read_authority
from raceme.flower import fleet_client as fleet
from raceme.flower.fleet_protocol import generate_keys

NOW = datetime.now(UTC)
DAY = timedelta(days=1)


@dataclass(frozen=True)
class Authority:
    """An authority that signs certificates with any content."""

    key: ec.EllipticCurvePrivateKey
    name: str

    @classmethod
    def made(cls, name: str = "authority") -> Authority:
        return cls(ec.generate_private_key(ec.SECP256R1()), name)

    def pem(self) -> bytes:
        """Return the authority's own certificate."""
        made = self._sign(self.name, self.key, NOW - DAY, NOW + DAY, "localhost")
        return made.public_bytes(Encoding.PEM)

    def server(
        self, since: datetime = NOW - DAY, until: datetime = NOW + DAY, host: str = "127.0.0.1"
    ) -> tuple[bytes, bytes]:
        """Return a server's key and certificate."""
        key = ec.generate_private_key(ec.SECP256R1())
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        made = self._sign("server", key, since, until, host)
        return private, made.public_bytes(Encoding.PEM)

    def _sign(
        self,
        subject: str,
        key: ec.EllipticCurvePrivateKey,
        since: datetime,
        until: datetime,
        host: str,
    ) -> x509.Certificate:
        named: x509.GeneralName = x509.DNSName(host)
        if host[0].isdigit():
            named = x509.IPAddress(ipaddress.ip_address(host))
        return (
            x509.CertificateBuilder()
            .subject_name(named_so(subject))
            .issuer_name(named_so(self.name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(since)
            .not_valid_after(until)
            .add_extension(x509.SubjectAlternativeName([named]), critical=False)
            .add_extension(x509.BasicConstraints(subject == self.name, None), critical=True)
            .sign(self.key, hashes.SHA256())
        )


def named_so(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


@contextmanager
def serving(certified: tuple[bytes, bytes] | None) -> Iterator[str]:
    """Accept connections, over TLS or in plain text, without a service; yield the address."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    if certified is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([certified]))
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


class Impatient(StopSignal):
    """Is stopped at the first wait."""

    def wait(self, seconds: float) -> bool:
        self.set()
        return True


def connect(address: str, authority: bytes) -> None:
    """Register with a server as a device does."""
    endpoint = fleet.Endpoint(address, root_certificates=authority)
    calls = PatientCalls(Impatient(), endpoint)
    with fleet.connect(endpoint, generate_keys(), calls, register=True):
        raise AssertionError("there is no SuperLink")


AUTHORITY = Authority.made()


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    logger = logging.getLogger("raceme.device")
    logger.addHandler(caplog.handler)
    yield lambda: caplog.text
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("since", "until", "said", "remedy"),
    [
        (NOW - 2 * DAY, NOW - DAY, "has expired", "make a new one on the server"),
        (NOW + DAY, NOW + 2 * DAY, "is not valid yet", "set the time, or if it is right, make"),
    ],
)
def test_an_expired_or_early_certificate_is_reported_and_waited_for(
    since: datetime, until: datetime, said: str, remedy: str, logged: Callable[[], str]
) -> None:
    with serving(AUTHORITY.server(since, until)) as address, pytest.raises(StoppedError):
        connect(address, AUTHORITY.pem())
    assert f"the certificate of {address} {said}" in logged()
    # Boards without a battery start with a wrong time: the time in the message shows the cause.
    assert f"{datetime.now(UTC):%Y-%m-%d}" in logged()
    assert remedy in logged()
    assert "authority" not in logged()


def test_another_server_than_expected_is_an_error_at_once() -> None:
    other = Authority.made("other")
    for certified, said in [
        (other.server(), "does not come from the authority"),
        (AUTHORITY.server(host="10.0.0.1"), "does not name '127.0.0.1'"),
        (AUTHORITY.server(host="server.example.org"), "--host 127.0.0.1"),
        (None, "speaks no TLS"),
    ]:
        with serving(certified) as address, pytest.raises(UserError) as refused:
            connect(address, AUTHORITY.pem())
        assert "is not the expected SuperLink" in str(refused.value)
        assert said in str(refused.value)


def test_a_server_of_another_authority_of_the_same_name_is_an_error_at_once(tmp_path: Path) -> None:
    for name in ("one", "other"):
        make_certificates(tmp_path / name, ["127.0.0.1"], [])
    files = (tmp_path / "one" / "server.key", tmp_path / "one" / "server.crt")
    with (
        serving((files[0].read_bytes(), files[1].read_bytes())) as address,
        pytest.raises(UserError, match="does not come from the authority"),
    ):
        connect(address, (tmp_path / "other" / "ca.crt").read_bytes())


def test_a_server_with_a_valid_certificate_is_connected_to() -> None:
    # The connection succeeds, and then shows that this is no SuperLink.
    with (
        serving(AUTHORITY.server()) as address,
        pytest.raises(UserError, match="not a Fleet API"),
    ):
        connect(address, AUTHORITY.pem())


JUNK = {
    "empty": b"",
    "no PEM": b"junk",
    "framed junk": b"-----BEGIN CERTIFICATE-----\njunk\n-----END CERTIFICATE-----\n",
    "a key": AUTHORITY.server()[0],
    "one of two": AUTHORITY.pem()
    + b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
}


@pytest.mark.parametrize("content", JUNK.values(), ids=JUNK.keys())
def test_a_file_without_an_authority_is_an_error_at_once(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "ca.crt"
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a certificate in PEM format"):
        read_authority(path)


def test_authorities_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "ca.crt"
    path.write_bytes(AUTHORITY.pem() + Authority.made().pem())
    assert read_authority(path) == path.read_bytes()
    with pytest.raises(UserError, match="cannot be read"):
        read_authority(tmp_path / "nowhere")
