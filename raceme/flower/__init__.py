"""All uses of Flower's private API: the bridge to Flower's versions."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_flower() -> tuple[str, str]:
    """Return the name of the installed distribution of Flower, and its version."""
    for package in ("flwr", "flwr-nightly"):
        try:
            return package, version(package)
        except PackageNotFoundError:
            continue
    # A checkout on the module path has no metadata.
    return "flwr", "unknown"
