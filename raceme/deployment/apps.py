"""The ClientApps that a device runs: which may, whether they are genuine, loaded once."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flwr.clientapp import ClientApp

from raceme import __version__
from raceme.compat import INVALID_APP, LOAD_APP_EXCEPTION, fleet
from raceme.compat.fleet import Run
from raceme.config import Value
from raceme.deployment.trust import OWN_APP, Trust, UntrustedError


class RefusedAppError(Exception):
    """An app is not run on this device.

    Attributes
    ----------
    code : int
        Flower's code for the error reply.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True)
class LoadedRun:
    """A run's ClientApp, and the configuration that it is called with.

    Attributes
    ----------
    series_id : int
        Runs of one series share a client's state.
    """

    app: ClientApp
    config: dict[str, Value]
    series_id: int


class Apps:
    """Loads the ClientApp of a run from the app bundle that the SuperLink hands out.

    Raceme's own app is never taken from a bundle: the installed one runs, if it is of the same
    version. Other apps are unpacked into a folder of this process, from the very bytes whose hash
    was checked, and one at a time is kept.

    Parameters
    ----------
    trust : Trust, optional
        Which apps, and what of them, the device's owner allows; by default everything.
    node : Mapping, optional
        What the owner tells the apps.
    """

    def __init__(self, trust: Trust | None = None, node: Mapping[str, Value] | None = None) -> None:
        self._trust, self._node = trust or Trust(), dict(node or {})
        self._runs: dict[int, LoadedRun] = {}
        self._foreign: tuple[str, ClientApp] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def of_run(
        self, run_id: int, describe: Callable[[int], Run], fetch: Callable[[Run], bytes]
    ) -> LoadedRun:
        """Return the ClientApp and the configuration of a run.

        Parameters
        ----------
        run_id : int
            The run.
        describe : Callable
            Returns what the SuperLink says about a run.
        fetch : Callable
            Returns the bytes of a run's app bundle.

        Raises
        ------
        RefusedAppError
            The app is not what the run announced, is not trusted, or cannot be loaded.
        """
        if run_id not in self._runs:
            run = describe(run_id)
            bundle = fetch(run)
            name, version, reference = _checked(bundle, run)
            config = self._checked_config(name, bundle, run)
            app = self._load(name, version, reference, bundle, run.fab_hash)
            if len(self._runs) >= 8:
                del self._runs[next(iter(self._runs))]
            self._runs[run_id] = LoadedRun(app, config, run.series_id)
        return self._runs[run_id]

    def _checked_config(self, name: str, bundle: bytes, run: Run) -> dict[str, Value]:
        """Return the configuration of a run that the device's owner allows."""
        try:
            self._trust.check_app(name)
            config = fleet.run_config(bundle, run)
            if name == OWN_APP:
                self._trust.check_run(config, self._node)
        except UntrustedError as error:
            raise RefusedAppError(INVALID_APP, str(error)) from None
        # A server may write anything into it.
        except Exception as error:
            reason = f"the run's configuration cannot be read: {type(error).__name__}: {error}"
            raise RefusedAppError(INVALID_APP, reason) from error
        return config

    def close(self) -> None:
        """Remove what was unpacked."""
        self._forget_foreign()

    def _load(
        self, name: str, version: str, reference: str, bundle: bytes, digest: str
    ) -> ClientApp:
        if name == OWN_APP:
            return _own_app(version)
        if self._foreign is None or self._foreign[0] != digest:
            self._forget_foreign()
            self._foreign = (digest, self._load_foreign(reference, bundle))
        return self._foreign[1]

    def _load_foreign(self, reference: str, bundle: bytes) -> ClientApp:
        self._folder = tempfile.TemporaryDirectory(prefix="raceme-app-")
        try:
            folder = fleet.install_app(bundle, Path(self._folder.name))
            app = fleet.load_client_app(reference, folder)
        # An app may raise anything while it is imported, SystemExit included.
        except (Exception, SystemExit) as error:
            reason = f"the app cannot be loaded: {type(error).__name__}: {error}"
            raise RefusedAppError(LOAD_APP_EXCEPTION, reason) from error
        module = sys.modules[reference.partition(":")[0]]
        if not str(module.__file__).startswith(str(folder)):
            raise RefusedAppError(
                LOAD_APP_EXCEPTION,
                f"the app's module '{module.__name__}' has the name of one that is installed here",
            )
        return app

    def _forget_foreign(self) -> None:
        """Drop the foreign app, its runs and its modules: the next may use the same names."""
        if self._folder is None:
            return
        root = str(Path(self._folder.name).absolute())
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(root):
                del sys.modules[name]
        sys.path[:] = [entry for entry in sys.path if not entry.startswith(root)]
        if self._foreign is not None:
            app = self._foreign[1]
            self._runs = {key: run for key, run in self._runs.items() if run.app is not app}
        self._foreign = None
        self._folder.cleanup()
        self._folder = None


def _checked(bundle: bytes, run: Run) -> tuple[str, str, str]:
    """Return name, version and ClientApp of a bundle, if it is the one that the run announced."""
    if hashlib.sha256(bundle).hexdigest() != run.fab_hash:
        raise RefusedAppError(INVALID_APP, "the app's hash is not the one that its run announced")
    try:
        name, version, reference = fleet.app_metadata(bundle)
    except Exception as error:
        raise RefusedAppError(INVALID_APP, f"the app bundle cannot be read: {error}") from error
    if (name, version) != (run.fab_id, run.fab_version):
        raise RefusedAppError(
            INVALID_APP,
            f"the app is {name} {version}, but its run announced {run.fab_id} {run.fab_version}",
        )
    return name, version, reference


def _own_app(version: str) -> ClientApp:
    if version != __version__:
        raise RefusedAppError(
            LOAD_APP_EXCEPTION,
            f"the run is of raceme {version}, this device has {__version__}: install the same",
        )
    from raceme.client_app import app, forget

    # One run at a time: another one comes with other settings, and its data are loaded anew.
    forget()
    return app
