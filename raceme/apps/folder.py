"""The folder of a simulation."""

from __future__ import annotations

import time
from pathlib import Path

from raceme.config.errors import UserError
from raceme.config.reading import absolute
from raceme.records.exchanges import MESSAGES
from raceme.records.folder import check_new, made_anew, make_folder


def prepare_folder(out: Path | None, name: str) -> Path:
    """Make the folder of a simulation.

    Parameters
    ----------
    out : Path or None
        Where; by default a new folder in ``runs``.
    name : str
        The app's.

    Raises
    ------
    UserError
        There is something in the folder already, or it cannot be made.
    """
    if out is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        return made_anew(Path("runs").resolve() / f"{stamp}-{name}")
    folder = absolute(out)
    if (folder / MESSAGES).exists():
        raise UserError(f"{folder} holds a run already; choose another folder with --out.")
    check_new(folder)
    make_folder(folder)
    return folder
