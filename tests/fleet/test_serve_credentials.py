"""Certificates and keys of `raceme serve`."""

from __future__ import annotations

import datetime
import shutil
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from log_lines import lines_with
from processes import free_port
from serving import Later, fetch, light_device, round_trip, serving

from raceme.cli import main
from raceme.core.errors import UserError
from raceme.core.identities import read_device_keys
from raceme.core.labels import read_labels
from raceme.fleet.certificates import (
    KeyRegistry,
    expiry,
    make_certificates,
    read_certificates,
    read_device_key,
    revoke_keys,
    rotate_key,
)
from raceme.fleet.serve import ServeOptions, prepare, serve, with_registry
from raceme.flower.fleet_client import Link, RejoinError
from raceme.flower.messages import NODE_UNAVAILABLE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_certificates(tmp_path / "certs", ["server.example.org"], ["kitchen", "garden"])
    return tmp_path / "certs"


def test_certificates_of_raceme_certs_are_accepted(folder: Path) -> None:
    certificates = read_certificates(folder)
    assert certificates.certificate == (folder / "server.crt").read_bytes()
    assert certificates.key == (folder / "server.key").read_bytes()
    assert certificates.authority == (folder / "ca.crt").read_bytes()


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "server.key").unlink()
    with pytest.raises(UserError, match=r"server\.key cannot be read.*raceme certs"):
        read_certificates(folder)


def test_a_file_that_is_something_else_is_refused(folder: Path) -> None:
    (folder / "server.crt").write_text("nonsense")
    with pytest.raises(UserError, match="cannot be read"):
        read_certificates(folder)


def test_files_that_do_not_belong_together_are_refused(folder: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path / "other", ["server.example.org"], [])
    shutil.copy(tmp_path / "other" / "server.key", folder)
    with pytest.raises(UserError, match=r"server\.key in .* is not the key of server\.crt"):
        read_certificates(folder)
    shutil.copy(tmp_path / "other" / "server.crt", folder)
    with pytest.raises(UserError, match="does not come from the authority"):
        read_certificates(folder)


def redate(folder: Path, name: str, since: datetime.datetime) -> None:
    """Issue a certificate again, valid for a day."""
    old = x509.load_pem_x509_certificate((folder / name).read_bytes())
    authority = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    made = (
        x509.CertificateBuilder()
        .subject_name(old.subject)
        .issuer_name(old.issuer)
        .public_key(old.public_key())
        .serial_number(1)
        .not_valid_before(since)
        .not_valid_after(since + datetime.timedelta(days=1))
        .sign(authority, hashes.SHA384())  # type: ignore[arg-type]
    )
    (folder / name).write_bytes(made.public_bytes(Encoding.PEM))


def test_a_certificate_that_is_out_of_date_is_refused(folder: Path) -> None:
    redate(folder, "server.crt", datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
    with pytest.raises(UserError, match="was valid until 2020-01-02"):
        read_certificates(folder)


@pytest.mark.parametrize(("days", "warnings"), [(29, 1), (31, 0)])
def test_a_certificate_of_less_than_a_month_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, days: int, warnings: int
) -> None:
    make_certificates(tmp_path, ["server.example.org"], [], days)
    until = expiry(read_certificates(tmp_path).certificate)
    left = until - datetime.datetime.now(datetime.UTC)
    assert abs(left - datetime.timedelta(days=days)) < datetime.timedelta(minutes=5)
    assert caplog.text.count(f"is valid until {until:%Y-%m-%d}") == warnings


def test_the_keys_of_all_devices_are_registered_and_unreadable_ones_left_out(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    both = KeyRegistry(folder)()
    assert set(both.values()) == {"kitchen", "garden"}
    assert all(key.startswith(b"-----BEGIN PUBLIC KEY-----") for key in both)
    (folder / "devices" / "garden.pub").write_text("nonsense")
    assert list(KeyRegistry(folder)().values()) == ["kitchen"]
    assert [line["device"] for line in lines_with(caplog, "garden.pub")] == ["garden"]


def test_a_registry_that_breaks_while_it_is_in_use_leaves_all_their_keys(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = KeyRegistry(folder)
    before = registry()
    garden = folder / "devices" / "garden.pub"
    saved = garden.read_bytes()
    for content in (b"", b"nonsense", (folder / "devices" / "kitchen.pub").read_bytes()):
        garden.write_bytes(content)
        assert registry() == registry() == before
    garden.unlink()
    assert list(registry().values()) == ["kitchen"]
    garden.write_bytes(saved)
    (folder / "devices").rename(folder / "away")
    caplog.clear()
    assert [list(registry().values()) for _ in range(3)] == [["kitchen"]] * 3
    (line,) = caplog.messages
    assert "devices cannot be read: No such file or directory. The former keys stay" in line
    (folder / "away").rename(folder / "devices")
    assert registry() == before


def test_a_device_is_revoked_or_given_another_key(folder: Path) -> None:
    old, listed = KeyRegistry(folder)(), folder / "device-keys"
    rotate_key(folder, "kitchen")
    new = KeyRegistry(folder)()
    assert sorted(new.values()) == sorted(read_device_keys(listed).values())
    assert sorted(new.values()) == ["garden", "kitchen"]
    assert len(old.keys() & new.keys()) == 1
    assert read_device_key(folder / "devices" / "kitchen")
    # The device has made the key itself, so that its private half is not here.
    make_certificates(folder.parent / "own", ["a"], ["own"])
    rotate_key(folder, "kitchen", folder.parent / "own" / "devices" / "own.pub")
    assert set(KeyRegistry(folder)().values()) == set(read_device_keys(listed).values())
    assert (folder / "devices" / "kitchen.pub").read_text().endswith(" kitchen\n")
    assert not (folder / "devices" / "kitchen").exists()
    revoke_keys(folder, ["kitchen"])
    assert (
        list(KeyRegistry(folder)().values())
        == list(read_device_keys(listed).values())
        == ["garden"]
    )
    revoke_keys(folder, ["garden"])
    assert not listed.exists()
    assert not list((folder / "devices").iterdir())


def test_mistakes_with_keys_change_nothing(folder: Path) -> None:
    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before = content()
    with pytest.raises(UserError, match=r"Unknown device 'kitchem'\. Did you mean 'kitchen'"):
        revoke_keys(folder, ["garden", "kitchem"])
    with pytest.raises(UserError, match="is the key of 'garden' already"):
        rotate_key(folder, "kitchen", folder / "devices" / "garden.pub")
    with pytest.raises(UserError, match="not a public elliptic-curve key"):
        rotate_key(folder, "kitchen", folder / "ca.crt")
    with pytest.raises(UserError, match="has no devices"):
        revoke_keys(folder / "missing", ["kitchen"])
    assert content() == before


def test_devices_get_labels_and_lose_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def certs(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["raceme", "certs", "--out", str(folder), *options])
        with suppress(SystemExit):
            main()
        return capsys.readouterr().err

    both = ("--device", "kitchen", "--device", "garden")
    assert not certs(*both, "--label", "room=hall", "--label", "floor=1")
    assert not certs("--device", "kitchen", "--label", "room=kitchen", "--label", "floor=")
    expected = {"kitchen": {"room": "kitchen"}, "garden": {"room": "hall", "floor": "1"}}
    assert read_labels(folder / "labels.toml") == expected
    assert "Did you mean 'garden'" in certs("--device", "gardem", "--label", "room=x")
    assert "--label: 'room' is not a list of labels" in certs(*both, "--label", "room")
    assert "give --device ID" in certs("--label", "room=x")
    assert read_labels(folder / "labels.toml") == expected
    # Labels come from the folder, unless another file is named.
    assert with_registry({}, folder)["labels"] == str(folder / "labels.toml")
    assert with_registry({"labels": "own.toml"}, folder)["labels"] == "own.toml"
    assert with_registry({"labels": "own.toml"}, None) == {"labels": "own.toml"}


def start(folder: Path, *, any_device: bool = False, **keys: str) -> None:
    """Start a server that is stopped at once."""
    out = str(folder.parent / "out")
    given = {"strategy": "fedasync", "dataset": "digits", "out": out, **keys}
    config = prepare(given if any_device else with_registry(given, folder))
    address = f"127.0.0.1:{free_port()}"
    options = ServeOptions(address, folder, any_device=any_device, metrics="off")
    serve(config, options, stop=lambda: "enough")


TRUST = "ids are taken on trust"


def test_a_server_whose_folder_lacks_the_list_of_keys_says_that_it_trusts(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(folder)
    assert TRUST not in caplog.text
    listed = (folder / "device-keys").rename(folder / "elsewhere")
    start(folder, **{"device-keys": str(listed)})
    assert TRUST not in caplog.text
    start(folder)
    assert caplog.text.count(TRUST) == 1
    start(folder, any_device=True)
    assert caplog.text.count(TRUST) == 2


@pytest.mark.parametrize("early", [["server.crt"], ["ca.crt", "server.crt"], []])
def test_a_certificate_that_is_not_valid_yet_is_warned_of(
    folder: Path, caplog: pytest.LogCaptureFixture, early: list[str]
) -> None:
    """A server whose board has no battery may start before its clock is set."""
    now = datetime.datetime.now(datetime.UTC)
    for name in early:
        redate(folder, name, now + datetime.timedelta(days=40))
    start(folder)
    said = [line for line in caplog.messages if "by this machine's clock" in line]
    assert len(said) == bool(early)
    for line in said:
        assert line.startswith(f"{early[0]} is not valid before")
        assert f"{now + datetime.timedelta(days=40):%Y-%m-%d}" in line
        assert f"{now:%Y-%m-%d}" in line
        assert ("another folder" in line) is ("ca.crt" in early)


@pytest.mark.parametrize("how", ["revoked", "rotated"])
def test_an_online_device_without_its_key_is_disconnected_and_its_work_given_up(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    caplog.set_level("INFO", "raceme")
    keys = read_device_key(folder / "devices" / "kitchen")
    with serving(tmp_path, registered=KeyRegistry(folder)) as server, ExitStack() as stack:
        link = stack.enter_context(light_device(server, keys))
        other = read_device_key(folder / "devices" / "garden")
        garden = stack.enter_context(light_device(server, other))
        sent = server.push(link.node_id, 1)
        fetch(link)
        waiting = Later(lambda: refusal(link))
        begun = time.monotonic()
        if how == "revoked":
            revoke_keys(folder, ["kitchen"])
        else:
            rotate_key(folder, "kitchen")
        (reply,) = server.wait(sent)
        assert reply.error.code == NODE_UNAVAILABLE
        # The pending call ends at once, not at its timeout of 15 s.
        assert isinstance(waiting.wait(), RejoinError)
        assert time.monotonic() < begun + 8
        assert server.grid.key_changes() == [("kitchen", how)]
        assert [line["device"] for line in lines_with(caplog, "Key of kitchen")] == ["kitchen"]
        assert server.grid.key_changes() == []
        round_trip(server, garden, 2)
        if how == "rotated":
            new = read_device_key(folder / "devices" / "kitchen")
            again = stack.enter_context(light_device(server, new))
            assert again.node_id != link.node_id


def refusal(link: Link) -> Exception | None:
    """Return the reason why a device gets no more work."""
    try:
        link.receive(15.0)
    except RejoinError as error:
        return error
    return None
