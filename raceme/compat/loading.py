"""Importing somebody's ClientApp."""

from __future__ import annotations

from pathlib import Path

from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import LoadClientAppError
from flwr.supercore.object_ref import load_app

__all__ = ["LoadClientAppError", "load_client_app"]


def load_client_app(reference: str, folder: Path) -> ClientApp:
    """Import a ClientApp from a folder, which is put on the module search path."""
    app = load_app(reference, LoadClientAppError, folder)
    if not isinstance(app, ClientApp):
        raise LoadClientAppError(f"'{reference}' is not a ClientApp")
    return app
