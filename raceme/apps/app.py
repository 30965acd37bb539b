"""A Flower app in its folder: what its ``pyproject.toml`` says, and its two parts."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from raceme.compat import app as compat
from raceme.config.errors import UserError, unknown_name
from raceme.datasets.torchvision_guard import without_operators

Value = str | int | float | bool
App = TypeVar("App", ServerApp, ClientApp)

_DISTRIBUTION = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class FlowerApp:
    """A Flower app that has been read, and not yet imported.

    Attributes
    ----------
    folder : Path
        Where its ``pyproject.toml`` is; absolute.
    name : str
        The project's name.
    server, client : str
        The ServerApp and the ClientApp, as ``module:attribute``.
    run_config : Mapping[str, Value]
        Flower's run config, with what overrides it.
    dependencies : tuple[str, ...]
        The distributions that it asks for, as its ``pyproject.toml`` states them.
    """

    folder: Path
    name: str
    server: str
    client: str
    run_config: Mapping[str, Value]
    dependencies: tuple[str, ...] = ()

    def load_server(self) -> ServerApp:
        """Import the ServerApp.

        Raises
        ------
        UserError
            It cannot be imported, or needs Flower's older interface.
        """
        app = self._load(self.server, compat.load_server_app)
        if not compat.takes_a_grid(app):
            raise UserError(
                f"The ServerApp of {self.folder} is made with server_fn, Flower's older interface, "
                "which waits on the wall clock. Give it an @app.main() function that calls "
                "strategy.start(grid, …); Flower's guide 'Upgrade to Message API' shows how."
            )
        return app

    def load_client(self) -> ClientApp:
        """Import the ClientApp.

        Raises
        ------
        UserError
            It cannot be imported.
        """
        return self._load(self.client, compat.load_client_app)

    def _load(self, reference: str, load: Callable[[str, Path], App]) -> App:
        try:
            return without_operators(lambda: load(reference, self.folder))
        except compat.LoadAppError as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise UserError(f"{self.folder}/pyproject.toml: {reason}.") from None
        except ModuleNotFoundError as error:
            raise self.missing(error, reference) from None
        except (Exception, SystemExit) as error:
            reason = " ".join(str(error).split()) or "no reason given"
            raise UserError(
                f"The app in {self.folder} cannot be imported: {type(error).__name__}: {reason} "
                f"({_place(error, self.folder)})."
            ) from None

    def missing(self, error: ModuleNotFoundError, reference: str = "") -> UserError:
        """Say which module is missing, and what to type."""
        module = error.name or str(error)
        own = reference.partition(":")[0]
        if own and (own == module or own.startswith(f"{module}.")):
            return UserError(
                f"{self.folder}/pyproject.toml names '{reference}', and there is no module "
                f"'{module}' in {self.folder}."
            )
        wanted = self._distribution(module.partition(".")[0])
        install = f"python3 -m pip install '{wanted}'" if wanted else self._install_all()
        return UserError(
            f"The app in {self.folder} needs the module '{module}', which is not installed: "
            f"{install}"
        )

    def _distribution(self, module: str) -> str | None:
        """Return the dependency that has a module's name, as the app states it."""
        for dependency in self.dependencies:
            name = _DISTRIBUTION.match(dependency)
            if name and _plain(name.group()) in (_plain(module), f"scikit_{_plain(module)[2:]}"):
                return dependency
        return None

    def _install_all(self) -> str:
        return f"python3 -m pip install -e {self.folder} (all that its pyproject.toml asks for)"


def read_app(folder: Path, overrides: Sequence[str] = ()) -> FlowerApp:
    """Read the app in a folder.

    Parameters
    ----------
    folder : Path
        Where its ``pyproject.toml`` is.
    overrides : Sequence[str]
        What changes its run config, as ``flwr run`` takes it after ``--run-config``:
        ``"key=1 other='text'"``, or a TOML file.

    Raises
    ------
    UserError
        There is no Flower app, or a key does not exist.
    """
    folder = folder.expanduser().resolve()
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {what}; expected the folder of a Flower app.")
    try:
        project = compat.project_config(folder)
        known = compat.default_config(project)
    except FileNotFoundError:
        raise UserError(
            f"{folder} is no Flower app: it has no pyproject.toml. `flwr new` makes an app."
        ) from None
    except (ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{folder} is no Flower app: {reason}") from None
    components = project["tool"]["flwr"]["app"]["components"]
    if not all(isinstance(components.get(name), str) for name in ("serverapp", "clientapp")):
        raise UserError(
            f"{folder}/pyproject.toml names no serverapp and clientapp in "
            "[tool.flwr.app.components]; other apps have nothing to simulate."
        )
    return FlowerApp(
        folder=folder,
        name=str(project["project"]["name"]),
        server=components["serverapp"],
        client=components["clientapp"],
        run_config={**known, **_overrides(overrides, known)},
        dependencies=tuple(map(str, _dependencies(project))),
    )


def _dependencies(project: Mapping[str, Any]) -> list[Any]:
    listed = project["project"].get("dependencies", [])
    return listed if isinstance(listed, list) else []


def _overrides(texts: Sequence[str], known: Mapping[str, Value]) -> dict[str, Value]:
    """Read what is typed after ``--run-config``; keys must be the app's, as Flower has it."""
    try:
        given = compat.parse_overrides(list(texts))
    except (ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--run-config cannot be read: {reason}") from None
    if any(text.strip() for text in texts) and not given:
        raise UserError(
            f"--run-config takes 'key=value key=value', got '{' '.join(texts)}'; texts are quoted: "
            "key='\"text\"'."
        )
    for name in given:
        if name not in known:
            raise unknown_name("key in --run-config", name, known)
    return given


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def _place(error: BaseException, folder: Path) -> str:
    """Return where in an app an error came up: file and line."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(str(folder))]
    last = (own or frames)[-1]
    return f"{last.filename}:{last.lineno}"
