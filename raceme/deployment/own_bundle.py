"""Raceme itself as a Flower app with a configuration of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import tomli_w

import raceme
from raceme.compat.bundle import App, build_bundle
from raceme.config import RunConfig, Value

_NAME = "raceme/raceme"


def app_of(config: RunConfig) -> App:
    """Return this package as the app bundle that the devices of a run fetch."""
    # The folder is the server's own affair, and the same run must have the same bundle again.
    keys = config.with_values(out="", resume="").to_mapping()
    with tempfile.TemporaryDirectory(prefix="raceme-serve-") as folder:
        bundle = build_bundle(_write_app(Path(folder) / "raceme", keys))
    return App(_NAME, raceme.__version__, bundle)


def _write_app(folder: Path, keys: Mapping[str, Value]) -> Path:
    """Write the package, with a configuration, as a Flower app in a folder."""
    source = Path(raceme.__file__).parent
    shutil.copytree(source, folder / "raceme", ignore=shutil.ignore_patterns("__pycache__"))
    tree: dict[str, object] = {}
    for name, value in keys.items():
        table, _, option = name.rpartition(".")
        inner = tree.setdefault(table, {}) if table else tree
        assert isinstance(inner, dict), "tables hold hyper-parameters only"
        inner[option] = value
    project = {
        "project": {
            "name": "raceme",
            "version": raceme.__version__,
            "description": "Asynchronous, clustered federated learning on Flower",
            "license": "Apache-2.0",
            "dependencies": [],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "raceme",
                    "components": {
                        "serverapp": "raceme.server_app:app",
                        "clientapp": "raceme.client_app:app",
                    },
                    "config": tree,
                }
            }
        },
    }
    (folder / "pyproject.toml").write_text(tomli_w.dumps(project), encoding="utf-8")
    return folder
