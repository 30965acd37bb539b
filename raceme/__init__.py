"""Raceme: asynchronous, clustered federated learning on Flower."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raceme.notebook import OpenComparison, OpenRun

__version__ = "0.1.0"


def open(folder: str | Path) -> OpenRun | OpenComparison:
    """Open what `raceme run`, `compare`, `reproduce` or `serve` has left, e.g. in a notebook.

    Parameters
    ----------
    folder : str or Path
        The folder of a run or of a comparison.

    Returns
    -------
    OpenRun or OpenComparison
        Its tables as pandas data frames, its figures, its models; see :mod:`raceme.notebook`.

    Raises
    ------
    UserError
        There is neither in the folder, or it is damaged.
    """
    # Imported here: most of what imports this package draws nothing.
    from raceme.notebook import open_folder

    return open_folder(folder)
