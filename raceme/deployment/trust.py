"""What the owner of a device lets a server have it do: which apps, which models, which data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points

from raceme.config import RunConfig, Value, expanded
from raceme.config.errors import UserError

OWN_APP = "raceme/raceme"
MODEL_GROUP = "raceme.models"
"""Entry points of installed packages in this group name functions that build models."""

_MODEL = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_LONGEST = 100
_OWNERS = ("data-root", "data-file", "download")
"""Keys that say what is read of a device's files, and whether more are fetched."""


class UntrustedError(Exception):
    """A run wants of a device what its owner has not allowed; the message says what that is."""


@dataclass(frozen=True)
class Trust:
    """What a device may do.

    Without trusted apps it runs any that a server hands out: code that may do whatever the device's
    user may. With them nothing but their code runs; and as Raceme's own app imports the model that
    a run names, and reads the files that it names, these are the owner's to allow too.

    Attributes
    ----------
    apps : tuple[str, ...]
        The apps that may run, as publisher/name; empty allows everything.
    models : tuple[str, ...]
        Models beside Raceme's own, as ``module:function``.

    Raises
    ------
    UserError
        One of them is none, or there are models and no apps.
    """

    apps: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.apps:
            if name.count("/") != 1:
                raise UserError(
                    f"'{name}' is not an app: expected PUBLISHER/NAME, for example "
                    f"--trusted-app {OWN_APP}"
                )
        for model in self.models:
            if not _MODEL.fullmatch(model):
                raise UserError(
                    f"'{model}' is not a model of your own: expected MODULE:FUNCTION, for example "
                    "--trusted-model my_models:build. Raceme's own need no trust."
                )
        if self.models and not self.apps:
            raise UserError(
                "--trusted-model allows nothing without --trusted-app: any app runs then, with "
                f"whatever it brings. Give --trusted-app {OWN_APP} too."
            )

    def check_app(self, name: str) -> None:
        """Refuse an app that may not run.

        Raises
        ------
        UntrustedError
            It may not.
        """
        if self.apps and name not in self.apps:
            raise UntrustedError(f"the app {name} is not trusted on this device")

    def check_run(self, run: Mapping[str, Value], node: Mapping[str, Value]) -> None:
        """Refuse a run of Raceme's own app that would import or read what its owner never named.

        Parameters
        ----------
        run : Mapping
            The run's configuration.
        node : Mapping
            The device's own, which its owner has given it.

        Raises
        ------
        UntrustedError
            It would.
        UserError
            The configuration cannot be read.
        """
        if not self.apps:
            return
        keys = expanded(run)
        model = RunConfig.from_mapping(keys, lenient=True).model or ""
        if ":" in model and model not in self.models and model not in _installed():
            raise UntrustedError(
                f"the model {_shown(model)} is not trusted on this device: its owner allows one "
                "with --trusted-model MODULE:FUNCTION"
            )
        for key in _OWNERS:
            if keys.get(key) not in (None, "", False, "false") and key not in node:
                raise UntrustedError(
                    f"{key} is for the owner of this device to say, in its --node-config: this "
                    f"run says {_shown(keys[key])}"
                )


def _shown(value: object) -> str:
    """Return what a server wrote as it may stand in a log."""
    return repr(value)[:_LONGEST]


def _installed() -> set[str]:
    """Return the models that installed packages declare."""
    return {entry.value for entry in entry_points(group=MODEL_GROUP)}
