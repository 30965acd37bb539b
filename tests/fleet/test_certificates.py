"""`raceme certs`: its files, their permissions, and that none is overwritten."""

from __future__ import annotations

import ipaddress
import os
import stat
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from typer.testing import CliRunner

from raceme.cli import app, main
from raceme.core.errors import UserError
from raceme.core.identities import read_device_keys
from raceme.fleet.certificates import make_certificates, read_device_key

HOSTS = ["server.example.org", "192.0.2.7", "2001:db8::7"]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_private_keys_are_for_their_owner_only(tmp_path: Path) -> None:
    written = make_certificates(tmp_path / "certs", HOSTS, ["kitchen"])
    private = {"ca.key", "server.key", "kitchen"}
    public = {"ca.crt", "server.crt", "kitchen.pub", "device-keys"}
    assert {path.name for path in written} == private | public
    assert {path.name for path in written if mode(path) == 0o600} == private
    assert mode(tmp_path / "certs") == mode(tmp_path / "certs" / "devices") == 0o700


def test_the_server_is_certified_by_the_authority_under_all_its_names(tmp_path: Path) -> None:
    make_certificates(tmp_path, HOSTS, [])
    authority, server = certificate(tmp_path / "ca.crt"), certificate(tmp_path / "server.crt")
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    # Local processes such as Flower's connect to localhost.
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
    private, public = read_device_key(path)
    registered = load_ssh_public_key(path.with_name("kitchen.pub").read_bytes())
    assert isinstance(registered, ec.EllipticCurvePublicKey)
    assert registered.public_numbers() == public.public_numbers()
    assert isinstance(private.curve, ec.SECP384R1)


def test_devices_are_added_to_what_exists(tmp_path: Path) -> None:
    make_certificates(tmp_path, HOSTS, ["kitchen"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    added = make_certificates(tmp_path, HOSTS[:1], ["garden"])
    assert [path.name for path in added] == ["garden", "garden.pub", "device-keys"]
    assert all(path.read_bytes().startswith(content) for path, content in before.items())
    changed = [path.name for path in before if path.read_bytes() != before[path]]
    assert changed == ["device-keys"]


def test_every_device_is_in_the_list_that_binds_its_id_to_its_key(tmp_path: Path) -> None:
    make_certificates(tmp_path, HOSTS, ["kitchen", "garden"])
    make_certificates(tmp_path, HOSTS, ["cellar"])
    names = ["kitchen", "garden", "cellar"]
    bound = read_device_keys(tmp_path / "device-keys")
    assert sorted(bound.values()) == sorted(names)
    for key, name in bound.items():
        _, public = read_device_key(tmp_path / "devices" / name)
        assert public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) == key
    path = tmp_path / "device-keys"
    path.write_text(path.read_text().rstrip())
    make_certificates(tmp_path, HOSTS, ["shed"])
    names.append("shed")
    assert sorted(read_device_keys(path).values()) == sorted(names)
    # An old folder without the list gets one with all its devices.
    (tmp_path / "device-keys").unlink()
    make_certificates(tmp_path, HOSTS, ["attic"])
    assert set(read_device_keys(tmp_path / "device-keys").values()) == {*names, "attic"}


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
        (["other.example.org"], ["garden"], "does not cover 'other.example.org'"),
        (HOSTS, ["../etc"], "is not a valid device id"),
        (HOSTS, ["garden", "garden"], "have the same id"),
    ],
)
def test_existing_certificates_are_not_overwritten(
    tmp_path: Path, hosts: list[str], devices: list[str], match: str
) -> None:
    make_certificates(tmp_path, HOSTS, ["kitchen"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=match):
        make_certificates(tmp_path, hosts, devices)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_only_what_is_missing_is_made(tmp_path: Path) -> None:
    make_certificates(tmp_path, HOSTS, ["kitchen", "garden"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert make_certificates(tmp_path, HOSTS, ["kitchen"]) == []
    made = make_certificates(tmp_path, [], ["kitchen", "attic"])
    devices = tmp_path / "devices"
    listed = tmp_path / "device-keys"
    assert made == [devices / "attic", devices / "attic.pub", listed]
    assert set(read_device_keys(listed).values()) == {"kitchen", "garden", "attic"}
    assert {path: path.read_bytes() for path in before if path != listed} == {
        path: content for path, content in before.items() if path != listed
    }
    # A missing public key is derived from the private one; a device's own key is not replaced.
    (devices / "garden.pub").unlink()
    (devices / "kitchen").unlink()
    made = make_certificates(tmp_path, [], ["kitchen", "garden"])
    assert made == [devices / "garden.pub", listed]
    assert (devices / "garden.pub").read_bytes() == before[devices / "garden.pub"]
    assert set(read_device_keys(listed).values()) == {"kitchen", "garden", "attic"}


def test_a_device_is_added_without_the_name_of_the_server(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give --host"):
        make_certificates(tmp_path, [], ["garden"])
    assert not list(tmp_path.iterdir())
    make_certificates(tmp_path, HOSTS, [])
    assert tmp_path / "devices" / "garden" in make_certificates(tmp_path, [], ["garden"])


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    make_certificates(tmp_path, HOSTS, [])
    path = tmp_path / "server.key"
    with pytest.raises(UserError, match="not a device's private key"):
        read_device_key(path)


@pytest.mark.parametrize(
    "host",
    [
        *("", "\n", "a\n", "a b", "server:9092", "https://server", "[::1]", "ü.org", "a\x1b[31m"),
        *("0.0.0.0", "::", "fe80::1%eth0", "300.1.2.3", "1.2.3", "-a", "a.", "a..b", "*", "*.org"),
        *("a" * 64, ".".join(["a" * 60] * 5)),
    ],
)
def test_an_invalid_host_is_refused_before_anything_is_written(host: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a host name nor an address") as refused:
        make_certificates(tmp_path / "certs", ["server.example.org", host], ["kitchen"])
    # Errors are printed to a terminal, so that input must not contain control characters.
    assert str(refused.value).isprintable()
    assert not (tmp_path / "certs").exists()


@pytest.mark.parametrize(
    "host",
    ["localhost", "raceme_server-1", "xn--bcher-kva.example", "*.example.org", "::1", "3d.io"],
)
def test_names_that_dns_and_docker_give_are_hosts(host: str, tmp_path: Path) -> None:
    make_certificates(tmp_path, [host], [])
    names = certificate(tmp_path / "server.crt").extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert host in [str(name.value) for name in names.value]


@pytest.mark.parametrize("days", [0, 3651, 99_999_999])
def test_a_server_is_certified_no_longer_than_its_authority(days: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="between 1 and 3650"):
        make_certificates(tmp_path / "certs", HOSTS, [], days)
    assert not (tmp_path / "certs").exists()


def test_files_that_are_no_certificates_or_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"/dev/null/certs/ca\.key' cannot be written"):
        make_certificates(Path("/dev/null/certs"), HOSTS, [])
    make_certificates(tmp_path, HOSTS, [])
    (tmp_path / "server.crt").write_text("junk")
    with pytest.raises(UserError, match=r"server\.crt' is not a certificate of a server"):
        make_certificates(tmp_path, HOSTS, ["kitchen"])


@pytest.mark.parametrize("bits", [0o644, 0o640, 0o604, 0o602, 0o610, 0o666])
def test_a_key_that_others_can_read_needs_an_option(bits: int, tmp_path: Path) -> None:
    make_certificates(tmp_path, HOSTS, ["kitchen"])
    path = tmp_path / "devices" / "kitchen"
    path.chmod(bits)
    with pytest.raises(UserError, match=r"can be read by other users.*chmod 600.*--allow-open-key"):
        read_device_key(path)
    assert read_device_key(path, allow_open=True)
    path.chmod(0o400)
    assert read_device_key(path)


def test_a_key_of_another_user_may_be_for_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certificates(tmp_path, HOSTS, ["kitchen"])
    path = tmp_path / "devices" / "kitchen"
    path.chmod(0o640)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert read_device_key(path)
    path.chmod(0o644)
    with pytest.raises(UserError, match="can be read by other users"):
        read_device_key(path)


def test_the_command_takes_an_open_key_only_if_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_certificates(tmp_path, HOSTS, ["kitchen"])
    path = tmp_path / "devices" / "kitchen"
    path.chmod(0o644)
    # The invalid --when ends the command in any case, after the key was read.
    command = ["raceme", "device", "--superlink", "a:1", "--key", str(path), "--when", "never"]
    for more, said in [((), "can be read by other users"), (("--allow-open-key",), "--when")]:
        monkeypatch.setattr(sys, "argv", [*command, *more])
        with pytest.raises(SystemExit):
            main()
        assert said in capsys.readouterr().err


def test_a_device_and_a_token_are_made_by_one_command(tmp_path: Path) -> None:
    out = tmp_path / "certs"
    make_certificates(out, HOSTS, [])
    done = CliRunner().invoke(app, ["certs", "--out", str(out), "--device", "b", "--token"])
    assert done.exit_code == 0
    assert (out / "devices" / "b").is_file()
    assert (out / "view.token").is_file()
    done = CliRunner().invoke(
        app, ["certs", "--out", str(out), "--device", "b", "--rotate", "--host", "x"]
    )
    assert isinstance(done.exception, UserError)
    assert "--rotate and --revoke change keys only" in str(done.exception)
