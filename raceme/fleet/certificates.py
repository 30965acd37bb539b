"""Certificates and keys: an authority, the server's certificate, and a key pair per device.

The server proves its identity by a certificate (TLS). A device signs its calls with its private
key; the server knows the public key (a stock SuperLink: by `flwr supernode register`).
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import tomli_w
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from raceme.core.errors import UserError, about, check_known, os_errors_as_user_errors
from raceme.core.files import atomic_write
from raceme.core.labels import parse_labels, read_labels
from raceme.flower.fleet_protocol import Certificates
from raceme.flower.ports import Access, is_loopback, new_token

DEVICE_KEYS = "device-keys"
"""The file with the ids and the public keys of all devices."""
LABELS = "labels.toml"
"""The file with the labels of all devices."""
_AUTHORITY_DAYS = 3650
_LOCAL = ("localhost", "127.0.0.1")
"""Names under which a SuperLink's own processes, and `flwr` on the same host, reach it."""
_DEVICE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"
_HOST_NAME = re.compile(rf"(\*\.{_LABEL}\.)?({_LABEL}\.)*(?!\d+$){_LABEL}")
"""Host names of DNS and Docker, or ``*.DOMAIN``; no addresses of numbers and dots."""
_LONGEST_NAME = 253
_LARGEST_KEY = 65536
_PRIVATE = 0o600
_TOKEN = "view.token"
_SHORTEST_TOKEN = 20


def make_certificates(
    folder: Path, hosts: Sequence[str], devices: Sequence[str], days: int = 825
) -> list[Path]:
    """Write the missing files of the authority, the server's certificate and the devices' keys.

    Copy ``ca.crt`` to every device, ``ca.key`` nowhere, ``server.crt`` and ``server.key`` to the
    server, and ``devices/ID`` to one device; ``devices/ID.pub`` is registered with the SuperLink.
    Every device has a line in ``device-keys``, by which a run binds its id to its key.

    Parameters
    ----------
    folder : Path
        Target folder; created if missing.
    hosts : Sequence[str]
        Names and addresses under which devices reach the server; may be empty if its certificate
        exists.
    devices : Sequence[str]
        Ids of the devices that get a key pair.
    days : int
        Validity of the server's certificate.

    Returns
    -------
    list[Path]
        The files that were written.

    Raises
    ------
    UserError
        A name is invalid, or does not fit existing files.
    """
    _check_names(hosts, devices, (folder / "server.crt").exists())
    if not 1 <= days <= _AUTHORITY_DAYS:
        raise UserError(
            f"--days must be between 1 and {_AUTHORITY_DAYS}, the authority's validity, got {days}."
        )
    server, authority = folder / "server.crt", folder / "ca.crt"
    # Of a device that made its key itself, only the public key is here.
    keys = [path for device in devices if not _public(path := folder / "devices" / device).exists()]
    # In the folder of the authority, new devices are added to existing files.
    if server.exists() and authority.exists():
        _check_hosts(server, hosts)
        written = []
    else:
        written = _make_server(folder, hosts, days)
    for path in keys:
        written += _make_device(path)
    if keys:
        written.append(_list_keys(folder / DEVICE_KEYS, keys))
    return written


def make_token(folder: Path) -> Path:
    """Write the token of the page and of ``/metrics``, if there is none: ``view.token``.

    Raises
    ------
    UserError
        The file cannot be written, or exists.
    """
    return _write(folder / _TOKEN, new_token().encode() + b"\n", _PRIVATE)


def set_labels(folder: Path, devices: Sequence[str], labels: Sequence[str]) -> Path:
    """Add labels to devices; return the file of all labels.

    Parameters
    ----------
    folder : Path
        The folder of `raceme certs`.
    devices : Sequence[str]
        Ids of the devices.
    labels : Sequence[str]
        ``NAME=VALUE``; an empty value removes the label.

    Raises
    ------
    UserError
        There is no such device, a label is invalid, or the file cannot be read or written.
    """
    _check_known(folder, devices)
    path = folder / LABELS
    listed = read_labels(path) if path.exists() else {}
    for device in devices:
        own = listed.get(device, {})
        for label in labels:
            own.pop(label.partition("=")[0], None)
            if not label.endswith("="):
                try:
                    own |= parse_labels(label)
                except ValueError as error:
                    raise UserError(f"--label: {error}.") from None
        listed[device] = own
    return _replace(path, tomli_w.dumps(listed).encode())


def revoke_keys(folder: Path, devices: Sequence[str]) -> list[Path]:
    """Remove devices from the registry; a running server disconnects them.

    Parameters
    ----------
    folder : Path
        The folder of `raceme certs`, or the server's copy of it.
    devices : Sequence[str]
        Ids of the devices.

    Returns
    -------
    list[Path]
        The files that were removed or changed.

    Raises
    ------
    UserError
        There is no such device, or a file cannot be written.
    """
    _check_known(folder, devices)
    changed = []
    for device in devices:
        path = folder / "devices" / device
        for file in (_public(path), path):
            if file.exists():
                file.unlink()
                changed.append(file)
    return changed + _replace_lines(folder / DEVICE_KEYS, dict.fromkeys(devices, b""))


def rotate_key(folder: Path, device: str, public: Path | None = None) -> list[Path]:
    """Replace a device's key; the device stays the same client.

    Parameters
    ----------
    folder : Path
        The folder of `raceme certs`, or the server's copy of it.
    device : str
        Id of the device.
    public : Path, optional
        Public key that the device made itself; by default a new pair is made.

    Returns
    -------
    list[Path]
        The files that were changed.

    Raises
    ------
    UserError
        There is no such device, the key is invalid or another device's, or a file cannot be
        written.
    """
    _check_known(folder, [device])
    path = folder / "devices" / device
    key = ec.generate_private_key(ec.SECP384R1())
    line = _public_line(key.public_key(), device) if public is None else _read_line(public, device)
    pem = _plain(load_ssh_public_key(line))
    holder = KeyRegistry(folder)().get(pem)
    if holder is not None:
        raise UserError(
            f"'{public}' is the key of '{holder}' already: each device needs one of its own, made "
            "with `ssh-keygen -t ecdsa -b 384` or by leaving out --public-key."
        )
    written = []
    if public is None:
        written.append(_replace(path, _private_ssh(key), _PRIVATE))
    else:
        # The existing private key is the one being replaced.
        path.unlink(missing_ok=True)
    # The list is written first, so that a server that sees the new key can assign it.
    written += _replace_lines(folder / DEVICE_KEYS, {device: line})
    return [*written, _replace(_public(path), line)]


def _check_known(folder: Path, devices: Sequence[str]) -> None:
    known = [path.stem for path in (folder / "devices").glob("*.pub")]
    if not known:
        raise UserError(f"{folder} has no devices: give the folder of `raceme certs` with --out.")
    for device in devices:
        check_known("device", device, known)


def _read_line(path: Path, device: str) -> bytes:
    """Return a public key as a line of the registry."""
    try:
        key = load_ssh_public_key(path.expanduser().read_bytes())
    except OSError as error:
        raise UserError(f"The key '{path}' cannot be read: {error.strerror}.") from None
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UserError(
            f"'{path}' is not a public elliptic-curve key: expected a line such as "
            "'ecdsa-sha2-nistp384 AAAA…', as `ssh-keygen -t ecdsa -b 384` makes it."
        )
    return _public_line(key, device)


def _replace_lines(path: Path, lines: Mapping[str, bytes]) -> list[Path]:
    """Replace keys in the list of ids and keys, if it exists; an empty line removes a key."""
    if not path.is_file():
        return []
    kept = [
        line.rstrip(b"\n") + b"\n"
        for line in path.read_bytes().splitlines()
        if line.split(maxsplit=2)[2:3] not in [[name.encode()] for name in lines]
    ]
    content = b"".join([*kept, *lines.values()])
    if not content.strip():
        # For a server an empty list is an error, a missing one is not.
        path.unlink()
        return [path]
    return [_replace(path, content)]


def _replace(path: Path, data: bytes, mode: int = 0o644) -> Path:
    """Write a file in one step: a server that reads it sees the old or the new content."""
    with os_errors_as_user_errors(f"'{path}' cannot be written"), atomic_write(path) as temporary:
        temporary.unlink(missing_ok=True)
        _write(temporary, data, mode)
    return path


def read_device_key(
    path: Path, allow_open: bool = False
) -> tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]:
    """Read a device's private key.

    Parameters
    ----------
    path : Path
        Private key in OpenSSH format, without a passphrase.
    allow_open : bool
        Accept a file that other users can read.

    Raises
    ------
    UserError
        It cannot be read, other users can read it, or it is not an elliptic-curve key in OpenSSH
        format.
    """
    data, is_open = _read_private(path.expanduser())
    try:
        key = load_ssh_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(
            f"'{path}' is not a device's private key: expected an elliptic-curve key in OpenSSH "
            "format, as `raceme certs` and `ssh-keygen -t ecdsa -b 384` make it."
        )
    if is_open and not allow_open:
        raise UserError(
            f"The key '{path}' can be read by other users, who could impersonate this device: "
            f"chmod 600 '{path}' (or accept it with --allow-open-key)."
        )
    return key, key.public_key()


def _read_private(path: Path) -> tuple[bytes, bool]:
    """Return the content of a file with a private key, and whether other users can read it.

    Group members may read it if the file belongs to another user, such as root, who chose so.
    """
    with os_errors_as_user_errors(f"The key '{path}' cannot be read"), path.open("rb") as file:
        found, data = os.fstat(file.fileno()), file.read(_LARGEST_KEY)
    if os.name != "posix":
        # On this system the mode does not tell which users can read a file.
        return data, False
    mine = found.st_uid == os.geteuid()
    return data, bool(found.st_mode & (0o077 if mine else 0o007))


def _check_names(hosts: Sequence[str], devices: Sequence[str], has_server: bool) -> None:
    if not (hosts or has_server):
        raise UserError("Missing host name of the server: give --host NAME_OR_ADDRESS.")
    for host in hosts:
        _subject_name(host)
    for device in devices:
        if not _DEVICE_ID.fullmatch(device):
            raise UserError(
                f"{device!r} is not a valid device id: use letters, digits, '.', '_' and '-'."
            )
    if len(set(devices)) != len(devices):
        raise UserError("Two devices have the same id: give each its own.")


def _check_hosts(certificate: Path, hosts: Sequence[str]) -> None:
    """Refuse hosts that an existing server certificate does not cover."""
    try:
        loaded = x509.load_pem_x509_certificate(certificate.read_bytes())
        names = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        raise UserError(
            f"'{certificate}' is not a certificate of a server: remove server.crt and server.key "
            "to have new ones made."
        ) from None
    missing = [host for host in hosts if _subject_name(host) not in names]
    if missing:
        raise UserError(
            f"'{certificate}' exists already and does not cover '{missing[0]}': remove server.crt "
            "and server.key to have new ones made, or leave that host out."
        )


def _make_server(folder: Path, hosts: Sequence[str], days: int) -> list[Path]:
    """Write the server's key and certificate, and the authority's if there is none."""
    written = []
    authority_key_path, authority_path = folder / "ca.key", folder / "ca.crt"
    if authority_path.exists() or authority_key_path.exists():
        authority_key, authority = _read_authority(authority_key_path, authority_path)
    else:
        authority_key = ec.generate_private_key(ec.SECP384R1())
        authority = _authority_certificate(authority_key)
        written += [
            _write(authority_key_path, _private_pem(authority_key), _PRIVATE),
            _write(authority_path, authority.public_bytes(Encoding.PEM)),
        ]
    key = ec.generate_private_key(ec.SECP384R1())
    certificate = _server_certificate(key, hosts, days, authority, authority_key)
    return [
        *written,
        _write(folder / "server.key", _private_pem(key), _PRIVATE),
        _write(folder / "server.crt", certificate.public_bytes(Encoding.PEM)),
    ]


def _read_authority(
    key_path: Path, certificate_path: Path
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    try:
        key = load_pem_private_key(key_path.read_bytes(), password=None)
        certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"The authority in '{key_path.parent}' cannot be read ({error}): restore ca.key and "
            "ca.crt, or make new ones in another folder."
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"'{key_path}' is not an elliptic-curve key.")
    return key, certificate


def _make_device(path: Path) -> list[Path]:
    """Write the missing files of a device's key pair, in the format of Flower's SuperNodes."""
    if path.exists():
        _, public = read_device_key(path, allow_open=True)
        return [_write(_public(path), _public_line(public, path.name))]
    key = ec.generate_private_key(ec.SECP384R1())
    return [
        _write(path, _private_ssh(key), _PRIVATE),
        _write(_public(path), _public_line(key.public_key(), path.name)),
    ]


def _private_ssh(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


def _public_line(key: ec.EllipticCurvePublicKey, device: str) -> bytes:
    encoded = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return encoded + b" " + device.encode() + b"\n"


def _list_keys(path: Path, added: Sequence[Path]) -> Path:
    """Add devices to the list of ids and keys; create it with all devices if it is missing."""
    former = path.is_file()
    keys = [_public(key) for key in added] if former else sorted(added[0].parent.glob("*.pub"))
    lines = b"".join(key.read_bytes().rstrip(b"\n") + b"\n" for key in keys)
    if not former:
        return _write(path, lines)
    with os_errors_as_user_errors(f"'{path}' cannot be written"):
        # An editor may have left the last line without a line break.
        ended = path.read_bytes().endswith(b"\n") or not path.stat().st_size
        with path.open("ab") as file:
            file.write(lines if ended else b"\n" + lines)
    return path


def _public(path: Path) -> Path:
    return path.with_name(path.name + ".pub")


def _authority_certificate(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = _name("Raceme certificate authority")
    usage = _key_usage(signs_certificates=True)
    return (
        _builder(name, name, key.public_key(), _AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )


def _server_certificate(
    key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
    days: int,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    every = dict.fromkeys((*hosts, *_LOCAL))
    names = x509.SubjectAlternativeName([_subject_name(host) for host in every])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    return (
        _builder(_name(hosts[0][:64]), authority.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(names, critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority_key, hashes.SHA384())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # Valid from a past time, so that devices whose clocks are slightly behind accept it.
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=days))
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _subject_name(host: str) -> x509.GeneralName:
    """Return a host's name or address as a certificate states it."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    if address is not None and "%" not in host:
        if not address.is_unspecified:
            return x509.IPAddress(address)
    elif _HOST_NAME.fullmatch(host) and len(host) <= _LONGEST_NAME:
        return x509.DNSName(host)
    # An invalid name may have any characters: the message shows its repr.
    raise UserError(
        f"--host {host!r} is neither a host name nor an address under which devices could reach "
        "the server: give one without a port, for example server.example.org or 192.0.2.7."
    )


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, data: bytes, mode: int = 0o644) -> Path:
    """Write a new file; a private one is at no time readable by other users."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except FileExistsError:
        raise UserError(f"'{path}' exists already and is not overwritten.") from None
    except OSError as error:
        raise UserError(f"'{path}' cannot be written: {error.strerror}.") from None
    return path


# -----------------------------------------------------------------------------
# The server's certificate and the registered keys, checked before use.
# -----------------------------------------------------------------------------


log = logging.getLogger("raceme.serve")

_SOON = timedelta(days=30)


def read_certificates(folder: Path) -> Certificates:
    """Read ``ca.crt``, ``server.crt`` and ``server.key``.

    Raises
    ------
    UserError
        A file is missing, unreadable or expired, or they do not belong together.
    """
    try:
        authority, certificate, key = (
            (folder / name).read_bytes() for name in ("ca.crt", "server.crt", "server.key")
        )
    except OSError as error:
        raise UserError(
            f"{error.filename} cannot be read: {error.strerror}. `raceme certs --out {folder} "
            "--host NAME` makes certificates."
        ) from None
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


def expiry(certificate: bytes) -> datetime:
    """Return the end of a certificate's validity; warn if it is less than a month away."""
    until = x509.load_pem_x509_certificate(certificate).not_valid_after_utc
    if until < datetime.now(UTC) + _SOON:
        log.warning(
            "The server's certificate is valid until %s: before that remove server.crt and "
            "server.key, run `raceme certs` again, and restart the server",
            f"{until:%Y-%m-%d}",
        )
    return until


def warn_if_not_yet_valid(certificates: Certificates) -> None:
    """Warn if a certificate is not valid yet: this machine's clock, or the maker's, is wrong.

    This is no error, as a board without a battery may set its clock after the server's start.
    """
    now = datetime.now(UTC)
    files = {
        "ca.crt": (certificates.authority, "make all files anew in another folder"),
        "server.crt": (certificates.certificate, "remove server.crt and server.key, make new ones"),
    }
    for name, (content, remedy) in files.items():
        since = x509.load_pem_x509_certificate(content).not_valid_before_utc
        if since > now:
            log.warning(
                "%s is not valid before %s, and it is %s by this machine's clock: set the time, or "
                "if it is right, %s with `raceme certs` on a machine whose clock is right",
                name,
                f"{since:%Y-%m-%d %H:%M} UTC",
                f"{now:%Y-%m-%d %H:%M} UTC",
                remedy,
            )
            return


def access_to(folder: Path | None, host: str, *, spare: str = "") -> Access:
    """Return the access rules of a port for people and monitors.

    A loopback address has neither HTTPS nor a token.

    Parameters
    ----------
    folder : Path or None
        The folder of `raceme certs`, for HTTPS with the fleet's authority and its token.
    host : str
        The address to listen on.
    spare : str
        Token to use if the folder has none.

    Raises
    ------
    UserError
        A file cannot be read.
    """
    token = "" if folder is None or is_loopback(host) else read_token(folder)
    token = token or spare
    if is_loopback(host) or not token:
        return Access(host)
    if folder is None:
        return Access(host, token)
    found = read_certificates(folder)
    return Access(host, token, found.certificate.decode(), found.key.decode())


def read_token(folder: Path) -> str:
    """Return the token in a folder of `raceme certs`; empty if it has none.

    Raises
    ------
    UserError
        The file cannot be read, or its token is too short.
    """
    path = folder / _TOKEN
    if not path.exists():
        return ""
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UserError(f"The token '{path}' cannot be read: {reason}.") from None
    if len(token) < _SHORTEST_TOKEN or not token.isprintable():
        raise UserError(
            f"'{path}' holds no token of {_SHORTEST_TOKEN} letters or more: remove it, and make "
            f"one with `raceme certs --out {folder} --token`."
        )
    return token


class KeyRegistry:
    """The devices whose keys are registered: a file ``devices/ID.pub`` for each.

    A call returns the device of each public key (PEM), and reads files that have changed since the
    last call. If a file is invalid, or has the key of another device, its device keeps the former
    key; if the folder is missing, all keys stay.

    Parameters
    ----------
    folder : Path
        The folder of `raceme certs`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "devices"
        self._stamps: dict[Path, int] | None = None
        self._read: dict[Path, tuple[int, bytes | None]] = {}
        self._keys: dict[bytes, str] = {}

    def __call__(self) -> Mapping[bytes, str]:
        """Return the device of each registered key."""
        stamps: dict[Path, int] = {}
        try:
            for path in sorted(self._folder.iterdir()):
                if path.suffix == ".pub":
                    with suppress(FileNotFoundError):
                        stamps[path] = path.stat().st_ctime_ns
        except OSError as error:
            if self._stamps:
                log.warning(
                    "%s cannot be read: %s. The former keys stay valid",
                    self._folder,
                    error.strerror,
                )
                self._stamps = {}
            return self._keys
        # Calls of unknown nodes come here often.
        if stamps != self._stamps:
            self._stamps = stamps
            self._keys = self._merged(stamps)
        return self._keys

    def _merged(self, stamps: Mapping[Path, int]) -> dict[bytes, str]:
        read, keys = {}, dict[bytes, str]()
        # If two devices have one key, it belongs to the one that had it before.
        order = sorted(stamps, key=lambda path: self._read.get(path, (0, None))[0] != stamps[path])
        for path in order:
            former = self._read.get(path, (0, None))[1]
            key = former if self._read.get(path, (0,))[0] == stamps[path] else _public_key(path)
            if key in keys:
                log.warning(
                    "The key %s is that of '%s' and is ignored: each device needs one of its own",
                    path,
                    keys[key],
                    extra=about(path.stem),
                )
                key = None
            key = former if key is None else key
            read[path] = stamps[path], key
            if key is not None:
                keys[key] = path.stem
        self._read = read
        return keys


def _public_key(path: Path) -> bytes | None:
    """Return a public key in PEM; None, with a warning, if the file has none."""
    try:
        key = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError, TypeError) as error:
        text = "The key %s cannot be read and is ignored: %s"
        log.warning(text, path, error, extra=about(path.stem))
        return None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        text = "The key %s is not an elliptic-curve key and is ignored"
        log.warning(text, path, extra=about(path.stem))
        return None
    return _plain(key)


def _plain(key: object) -> bytes:
    return bytes(
        key.public_bytes(  # type: ignore[attr-defined]
            Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
        )
    )
