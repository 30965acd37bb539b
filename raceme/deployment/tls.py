"""TLS from a device's side: whom it believes, and what it means when no connection comes about."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from raceme.config.errors import UserError

_FAILED = ("handshake failed", "certificate_verify_failed", "hostname verification check failed")
"""What gRPC says when a connection fails for good, until somebody changes something."""
_OVER, _EARLY = "certificate has expired", "certificate is not yet valid"
_PLAIN, _FORGED = "wrong_version_number", "bad_signature"


def read_authority(path: Path) -> bytes:
    """Read the certificates of the authorities that a device believes.

    gRPC takes no offence at a file that holds none: it fails at every attempt to connect.

    Parameters
    ----------
    path : Path
        Holds them in PEM format.

    Raises
    ------
    UserError
        It cannot be read, has no certificate in it, or something that is none.
    """
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        raise UserError(f"The certificate '{path}' cannot be read: {error.strerror}.") from None
    try:
        x509.load_pem_x509_certificates(data)
    except ValueError:
        raise UserError(
            f"'{path}' is not a certificate in PEM format: give the ca.crt that `raceme certs` "
            "wrote, or the PEM file of the authority that signed the SuperLink's."
        ) from None
    return data


def passing_trouble(text: str, address: str) -> str | None:
    """Return what is wrong with a server's certificate if it may come right by itself.

    A certificate is renewed on the server, and a board without a battery learns the time a while
    after its start: a device that waits for it need not be visited.

    Parameters
    ----------
    text : str
        What gRPC says.
    address : str
        Of the SuperLink.

    Returns
    -------
    str or None
        None if it says nothing of a time.

    Raises
    ------
    UserError
        The connection will never come about with the device as it is.
    """
    said, now = text.lower(), f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    if _OVER in said:
        return (
            f"the certificate of {address} has expired (it is {now} by this device's clock): "
            "make a new one on the server"
        )
    if _EARLY in said:
        return (
            f"the certificate of {address} is not valid yet (it is {now} by this device's clock): "
            "set the time"
        )
    if not any(part in said for part in _FAILED):
        return None
    if _PLAIN in said:
        why = "it speaks no TLS: start it with certificates, or for a test use --insecure"
    elif "hostname" in said:
        host = address.rpartition(":")[0]
        why = (
            f"its certificate does not name '{host}': use a name that it has, or make one with "
            f"`raceme certs --host {host}`"
        )
    elif "certificate" in said or _FORGED in said:
        why = (
            "its certificate does not come from the authority in --root-certificates (without "
            "that option: from a public one)"
        )
    else:
        why = "it takes part in no TLS handshake, which its certificate may be the reason of"
    raise UserError(f"{address} is not the SuperLink that it should be: {why}. ({_detail(text)})")


def _detail(text: str) -> str:
    """Return the end of what gRPC says, which is the part that differs."""
    found = re.search(r"(OPENSSL_internal:|Custom verification).*", text, re.DOTALL)
    return " ".join((found[0] if found else text).split())[:200]
