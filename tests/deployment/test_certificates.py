"""`raceme certs`: what it writes, who may read it, and that nothing is overwritten."""

from __future__ import annotations

import ipaddress
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from raceme.config.errors import UserError
from raceme.deployment.certificates import make_certificates, read_device_key

HOSTS = ["server.example.org", "192.0.2.7", "2001:db8::7"]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_private_keys_are_for_their_owner_only(tmp_path: Path) -> None:
    written = make_certificates(tmp_path / "certs", HOSTS, ["kitchen"])
    private = {"ca.key", "server.key", "kitchen"}
    assert {path.name for path in written} == private | {"ca.crt", "server.crt", "kitchen.pub"}
    assert {path.name for path in written if mode(path) == 0o600} == private
    assert mode(tmp_path / "certs") == mode(tmp_path / "certs" / "devices") == 0o700


def test_the_server_is_certified_by_the_authority_under_all_its_names(tmp_path: Path) -> None:
    make_certificates(tmp_path, HOSTS, [])
    authority, server = certificate(tmp_path / "ca.crt"), certificate(tmp_path / "server.crt")
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    # Flower's own processes reach the server from the same host.
    assert names.get_values_for_type(x509.DNSName) == [HOSTS[0], "localhost"]
    assert names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address(host) for host in [*HOSTS[1:], "127.0.0.1"]
    ]
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_a_devices_keys_belong_together_and_are_of_the_kind_that_flower_registers(
    tmp_path: Path,
) -> None:
    make_certificates(tmp_path, HOSTS, ["kitchen"])
    path = tmp_path / "devices" / "kitchen"
    private, public = read_device_key(path.read_bytes(), path)
    registered = load_ssh_public_key(path.with_name("kitchen.pub").read_bytes())
    assert isinstance(registered, ec.EllipticCurvePublicKey)
    assert registered.public_numbers() == public.public_numbers()
    assert isinstance(private.curve, ec.SECP384R1)


def test_devices_are_added_to_what_exists(tmp_path: Path) -> None:
    make_certificates(tmp_path, HOSTS, ["kitchen"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    added = make_certificates(tmp_path, HOSTS[:1], ["garden"])
    assert [path.name for path in added] == ["garden", "garden.pub"]
    assert all(path.read_bytes() == content for path, content in before.items())


def test_a_new_server_certificate_comes_from_the_same_authority(tmp_path: Path) -> None:
    make_certificates(tmp_path, HOSTS, [])
    for name in ("server.crt", "server.key"):
        (tmp_path / name).unlink()
    make_certificates(tmp_path, ["elsewhere.example.org"], [])
    server = certificate(tmp_path / "server.crt")
    server.verify_directly_issued_by(certificate(tmp_path / "ca.crt"))


@pytest.mark.parametrize(
    ("hosts", "devices", "match"),
    [
        (HOSTS, ["kitchen"], "devices/kitchen' exists already"),
        (HOSTS, [], r"server\.crt' exists already"),
        (["other.example.org"], ["garden"], "does not cover 'other.example.org'"),
        (HOSTS, ["../etc"], "cannot be a device id"),
        (HOSTS, ["garden", "garden"], "named twice"),
        ([], ["garden"], "--host"),
    ],
)
def test_nothing_is_overwritten_or_made_up(
    tmp_path: Path, hosts: list[str], devices: list[str], match: str
) -> None:
    make_certificates(tmp_path, HOSTS, ["kitchen"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=match):
        make_certificates(tmp_path, hosts, devices)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    make_certificates(tmp_path, HOSTS, [])
    path = tmp_path / "server.key"
    with pytest.raises(UserError, match="not a device's private key"):
        read_device_key(path.read_bytes(), path)
