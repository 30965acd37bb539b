"""Certificates and keys that `raceme serve` is given."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from raceme.core.errors import UserError
from raceme.fleet.certificates import make_certificates, read_certificates, registered_keys


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_certificates(tmp_path / "certs", ["server.example.org"], ["kitchen", "garden"])
    return tmp_path / "certs"


def test_what_raceme_certs_makes_is_taken(folder: Path) -> None:
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


def test_a_certificate_that_is_out_of_date_is_refused(folder: Path) -> None:
    old = x509.load_pem_x509_certificate((folder / "server.crt").read_bytes())
    authority = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    then = datetime.datetime(2020, 1, 1)
    expired = (
        x509.CertificateBuilder()
        .subject_name(old.subject)
        .issuer_name(old.issuer)
        .public_key(old.public_key())
        .serial_number(1)
        .not_valid_before(then)
        .not_valid_after(then + datetime.timedelta(days=1))
        .sign(authority, hashes.SHA384())  # type: ignore[arg-type]
    )
    (folder / "server.crt").write_bytes(expired.public_bytes(Encoding.PEM))
    with pytest.raises(UserError, match="was valid until 2020-01-02"):
        read_certificates(folder)


def test_the_keys_of_all_devices_are_registered_and_unreadable_ones_left_out(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    both = registered_keys(folder)
    assert len(both) == 2
    assert all(key.startswith(b"-----BEGIN PUBLIC KEY-----") for key in both)
    (folder / "devices" / "garden.pub").write_text("nonsense")
    one = registered_keys(folder)
    assert len(one) == 1
    assert set(one) < set(both)
    assert "garden.pub" in caplog.text
