"""What `raceme serve` takes from the folder that `raceme certs` has made, checked before use."""

from __future__ import annotations

import logging
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_ssh_public_key,
)

from raceme.compat.fleet_api import Certificates
from raceme.config.errors import UserError

log = logging.getLogger("raceme.serve")


def read_certificates(folder: Path) -> Certificates:
    """Read ``ca.crt``, ``server.crt`` and ``server.key``.

    Raises
    ------
    UserError
        One is missing, unreadable or out of date, or they do not belong together.
    """
    authority, certificate, key = (
        _read(folder / name) for name in ("ca.crt", "server.crt", "server.key")
    )
    try:
        issuer = x509.load_pem_x509_certificate(authority)
        own = x509.load_pem_x509_certificate(certificate)
        private = load_pem_private_key(key, password=None)
    except (ValueError, TypeError) as error:
        raise UserError(f"The certificates in {folder} cannot be read: {error}.") from None
    again = "remove server.crt and server.key there and run `raceme certs` again."
    if _plain(private.public_key()) != _plain(own.public_key()):
        raise UserError(f"server.key in {folder} is not the key of server.crt: {again}")
    try:
        own.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        raise UserError(
            f"server.crt in {folder} does not come from the authority in ca.crt: {again}"
        ) from None
    until = own.not_valid_after_utc
    if until <= datetime.now(UTC):
        raise UserError(f"server.crt in {folder} was valid until {until:%Y-%m-%d}: {again}")
    return Certificates(authority, certificate, key)


def registered_keys(folder: Path) -> Collection[bytes]:
    """Return the public keys of the devices, ``devices/*.pub``, in PEM; leave out unreadable ones.

    Parameters
    ----------
    folder : Path
        The folder of `raceme certs`.
    """
    keys = set()
    for path in sorted((folder / "devices").glob("*.pub")):
        try:
            key = load_ssh_public_key(path.read_bytes())
        except (OSError, ValueError, TypeError) as error:
            log.warning("The key %s cannot be read and is left out: %s", path, error)
            continue
        if isinstance(key, ec.EllipticCurvePublicKey):
            keys.add(_plain(key))
        else:
            log.warning("The key %s is not an elliptic-curve key and is left out", path)
    return keys


def _plain(key: object) -> bytes:
    return bytes(
        key.public_bytes(  # type: ignore[attr-defined]
            Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
        )
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}. `raceme certs --out {path.parent} "
            "--host NAME` makes certificates."
        ) from None
