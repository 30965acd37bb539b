"""Flower apps: bundles, configuration, ServerApp and ClientApp, and the pauses of strategies."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click
import flwr.serverapp
from flwr.app import Context, Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.cli.install import install_from_fab
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import LoadClientAppError
from flwr.common.config import (
    flatten_dict,
    get_fab_config,
    get_fused_config_from_fab,
    get_metadata_from_config,
    get_project_config,
    parse_config_args,
)
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.server import SimpleClientManager
from flwr.serverapp import ServerApp
from flwr.serverapp.server_app import LoadServerAppError
from flwr.serverapp.strategy import strategy_utils
from flwr.supercore.object_ref import load_app as load_object
from flwr.supercore.run import RunNotRunningException as RunNotRunningException

from raceme.flower.fleet_protocol import HEARTBEAT_DEFAULT_INTERVAL, HEARTBEAT_PATIENCE
from raceme.flower.messages import SERVER_NODE_ID, Run

Value = str | int | float | bool

# -----------------------------------------------------------------------------
# Flower App Bundles, made and read as `flwr run` and SuperNodes do.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class App:
    """The app bundle of the run, which devices fetch.

    Attributes
    ----------
    name, version : str
        Name as ``PUBLISHER/NAME``, and version, both of the app's ``pyproject.toml``.
    bundle : bytes
        Content of the app's FAB file.
    run_config : Mapping[str, Value]
        Overrides of the run config in it.
    """

    name: str
    version: str
    bundle: bytes
    run_config: Mapping[str, Value] = field(default_factory=dict)


def build_bundle(folder: Path) -> bytes:
    """Return the app in a folder as a bundle; the same files make the same bytes."""
    return bytes(build_fab_from_disk(folder))


def app_metadata(bundle: bytes) -> tuple[str, str, str]:
    """Return publisher/name, version, and the reference of the ClientApp in an app bundle."""
    config = get_fab_config(bundle)
    name, version = get_metadata_from_config(config)
    components = config["tool"]["flwr"]["app"]["components"]
    return name, version, str(components.get("clientapp", ""))


def run_config(bundle: bytes, run: Run) -> dict[str, Value]:
    """Return an app's configuration with the overrides of a run."""
    return dict(get_fused_config_from_fab(bundle, run))


def install_app(bundle: bytes, folder: Path) -> Path:
    """Unpack an app bundle, checking the hash of every file in it."""
    with redirect_stdout(io.StringIO()):
        return install_from_fab(bundle, folder, skip_prompt=True)


# -----------------------------------------------------------------------------
# Running a user's Flower app: configuration, ServerApp and ClientApp, and pauses.
# -----------------------------------------------------------------------------


Part = TypeVar("Part", ServerApp, ClientApp)

_LOAD_ERRORS: dict[type, type[Exception]] = {
    ServerApp: LoadServerAppError,
    ClientApp: LoadClientAppError,
}
LoadAppError = tuple(_LOAD_ERRORS.values())
"""Raised if a reference leads to no app."""

MISSED_AFTER = float(HEARTBEAT_DEFAULT_INTERVAL * HEARTBEAT_PATIENCE)
"""Seconds without a heartbeat after which a SuperLink answers on behalf of a node."""

STRATEGIES_FOLDER = Path(flwr.serverapp.__file__).parent
"""Module of Flower's own strategies."""


def project_config(folder: Path) -> dict[str, Any]:
    """Read and check an app's ``pyproject.toml``.

    Raises
    ------
    FileNotFoundError
        The file is missing.
    ValueError
        The file is not TOML, or does not describe a Flower app.
    """
    return get_project_config(folder)


def default_config(project: Mapping[str, Any]) -> dict[str, Value]:
    """Return the run config of an app without overrides, with dotted keys."""
    return dict(flatten_dict(project["tool"]["flwr"]["app"].get("config", {})))


def parse_pairs(texts: list[str]) -> dict[str, Value]:
    """Read ``key=value key='text'`` as ``flwr run`` and SuperNodes do.

    Raises
    ------
    ValueError
        The text is not in this form.
    """
    try:
        return dict(parse_config_args(texts))
    except click.ClickException as error:
        raise ValueError(error.message) from None


def load_app(reference: str, folder: Path, kind: type[Part]) -> Part:
    """Import a ServerApp or a ClientApp from a folder, which is put on the module search path."""
    error = _LOAD_ERRORS[kind]
    app = load_object(reference, error, folder)
    if not isinstance(app, kind):
        raise error(f"'{reference}' is not a {kind.__name__}")
    return app


def takes_a_grid(app: ServerApp) -> bool:
    """Return whether a ServerApp has a main function; older ones have a `server_fn` instead."""
    return app.__dict__["_main"] is not None


TRAINING_STAGE = Stage.COLLECT_MASKED_VECTORS
"""The stage of SecAgg+ in which clients train; all stages are training messages."""


def secure_stage(message: Message) -> str:
    """Return the stage of SecAgg+ that a message requests; empty for other messages."""
    settings = message.content.config_records.get(RECORD_KEY_CONFIGS)
    return "" if settings is None else str(settings.get(Key.STAGE, ""))


def is_flowers(function: object) -> bool:
    """Return whether a function or method is defined in Flower's own code."""
    return str(getattr(function, "__module__", "")).startswith("flwr.")


def server_context(run_id: int, run_config: Mapping[str, Value]) -> Context:
    """Return a ServerApp's context: the run's config, and an empty state."""
    return Context(
        run_id=run_id,
        node_id=SERVER_NODE_ID,
        node_config={},
        state=RecordDict(),
        run_config=dict(run_config),
    )


@contextmanager
def patched(owner: Any, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Patch functions of a module or class within the context."""
    before = {name: getattr(owner, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(owner, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(owner, name, function)


def strategies_pause(pause: Callable[[float], None]) -> AbstractContextManager[None]:
    """Replace the pause of Flower's strategies while they wait for nodes to connect."""
    return patched(strategy_utils, {"sleep": pause})


def client_managers_wait(
    make: Callable[[Callable[..., bool]], Callable[..., bool]],
) -> AbstractContextManager[None]:
    """Replace the wait of Flower's older driver API for clients to connect.

    Parameters
    ----------
    make : Callable
        Returns a method `wait_for` of client managers, given Flower's own.
    """
    return patched(SimpleClientManager, {"wait_for": make(SimpleClientManager.wait_for)})
