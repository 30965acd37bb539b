"""`raceme certs`: certificates and keys of a fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def certs(
    out: Annotated[Path, typer.Option("--out", help="folder to write to; made if need be")],
    host: Annotated[
        list[str],
        typer.Option("--host", help="name or address of the server; may be repeated"),
    ],
    device: Annotated[
        list[str] | None,
        typer.Option("--device", help="id of a device; may be repeated", show_default=False),
    ] = None,
    days: Annotated[
        int, typer.Option("--days", metavar="DAYS", help="validity of the certificates", min=1)
    ] = 825,
) -> None:
    """Make a certificate authority, the server's certificate, and a key pair per device.

    Run again with more --device to add devices: what exists is kept.
    """
    from raceme.deployment.certificates import make_certificates

    for path in make_certificates(out, host, device or [], days):
        print(path)
