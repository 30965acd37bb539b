"""What only a host needs: the extra ``server`` of the distribution, and what is said without it."""

from __future__ import annotations

from raceme.config.errors import UserError

SERVER = {
    "PIL": "pillow",
    "jinja2": "jinja2",
    "matplotlib": "matplotlib",
    "prometheus_client": "prometheus-client",
    "safetensors": "safetensors",
    "scipy": "scipy",
    "sklearn": "scikit-learn",
    "threadpoolctl": "threadpoolctl",
    "torchvision": "torchvision",
}
"""Packages of the extra ``server`` as they are imported, and as they are installed."""

INSTALL = "python3 -m pip install -e '.[server]'"
"""What installs them, typed in a checkout."""


def explained(error: ModuleNotFoundError) -> Exception:
    """Return what to raise where an import has failed.

    Parameters
    ----------
    error : ModuleNotFoundError
        What the import raised.

    Returns
    -------
    Exception
        A `UserError` that names the command which installs the package, if it is one of the extra
        ``server``; `error` itself for any other.
    """
    package = SERVER.get((error.name or "").partition(".")[0])
    if package is None:
        return error
    return UserError(
        f"{package} is not installed: this is an installation for a device. On a host, type in "
        f"Raceme's folder: {INSTALL}"
    )
