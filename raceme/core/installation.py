"""Check of installed versions against the supported ones; commands that install extras.

The supported versions are those of ``pyproject.toml``, read from the metadata of the installation.
"""

from __future__ import annotations

import json
import os
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from urllib.parse import unquote, urlsplit

from raceme.core.errors import UserError

ANY_VERSION = "RACEME_ANY_VERSION"
NIGHTLY = {"flwr": "flwr-nightly"}
"""Distributions that replace another one."""


@cache
def check_versions() -> None:
    """Check that Python and the required packages are of supported versions.

    The environment variable ``RACEME_ANY_VERSION`` switches the check off, for tests of releases
    that are not supported yet.

    Raises
    ------
    UserError
        A version is not supported, or a package is missing.
    """
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    if os.environ.get(ANY_VERSION):
        return
    try:
        own = distribution("raceme")
    except PackageNotFoundError:
        # A checkout on the path, without an installation and its metadata.
        return
    supported = SpecifierSet(own.metadata["Requires-Python"] or "")
    if not supported.contains(platform.python_version(), prereleases=True):
        raise UserError(
            f"Raceme {own.version} supports Python {_words(supported)}; this is "
            f"{platform.python_version()}."
        )
    for required in map(Requirement, own.requires or ()):
        if required.marker is not None and not required.marker.evaluate({"extra": ""}):
            continue
        found = _installed(required.name)
        if found is None or not required.specifier.contains(found, prereleases=True):
            here = "it is not installed" if found is None else f"{found} is installed"
            raise UserError(
                f"Raceme {own.version} needs {required.name} {_words(required.specifier)}; {here}: "
                f"python3 -m pip install '{required.name}{required.specifier}'"
            )


def install_line(extra: str) -> str:
    """Return the command that installs an extra from the source of this installation."""
    try:
        origin = json.loads(distribution("raceme").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    url = urlsplit(origin.get("url", ""))
    place = unquote(url.path) if url.scheme == "file" and "dir_info" in origin else "raceme"
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"python3 -m pip install {editable}'{place}[{extra}]'"


def _installed(name: str) -> str | None:
    """Return the installed version of a package; None without one."""
    for candidate in (name, NIGHTLY.get(name, name)):
        try:
            return version(candidate)
        except PackageNotFoundError:
            pass
    return None


def _words(versions: object) -> str:
    """Write bounds of a version, the lower one first."""
    return " and ".join(sorted(str(versions).split(","), key=lambda bound: bound[0] == "<"))
