"""Test samples that the server keeps for itself: how many are wanted, and which they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from raceme.config.errors import UserError
from raceme.config.reading import absolute
from raceme.datasets.source import Indices


def wanted(text: str) -> float | None:
    """Read how many samples ``proxy`` asks for; None if it asks for none, or names a folder.

    Parameters
    ----------
    text : str
        A whole number, a share of the test samples between 0 and 1, a folder, or nothing.

    Raises
    ------
    UserError
        It is a number, and neither of these.
    """
    try:
        number = float(text)
    except ValueError:
        return None
    if 0 < number < 1 or (number >= 1 and number.is_integer()):
        return number
    raise UserError(
        f"proxy '{text}' must be a whole number of samples, a share above 0 and below 1, or a "
        "folder of .npz files."
    )


def folder_of(text: str) -> Path | None:
    """Read which folder ``proxy`` names; None if it names none.

    Raises
    ------
    UserError
        It is a number, and none that can be meant.
    """
    return Path(text) if text and wanted(text) is None else None


def with_whole_path(text: str) -> str:
    """Return ``proxy`` with the whole path of the folder, if it names one.

    Raises
    ------
    UserError
        There is no such folder on this machine.
    """
    folder = folder_of(text)
    if folder is None:
        return text
    found = absolute(folder)
    if not found.is_dir():
        raise UserError(
            f"proxy: there is no folder {found} on this machine. With flwr run it is the SuperLink "
            "that reads it, and a path that is not whole begins where the SuperLink was started."
        )
    return str(found)


def reserved(
    pools: Mapping[int, Indices],
    labels: Indices,
    text: str,
    rng: np.random.Generator,
    alike: bool,
) -> dict[int, Indices]:
    """Draw the server's samples of each distribution: one of each class first.

    Parameters
    ----------
    pools : Mapping[int, Indices]
        Test samples that can be spared, by distribution.
    labels : Indices
        Label of every sample of the dataset.
    text : str
        The key ``proxy``: how many, or which share of them.
    rng : np.random.Generator
        Draws.
    alike : bool
        Every distribution has the same samples in its pool, and is to have the same ones drawn.

    Returns
    -------
    dict[int, Indices]
        Sorted, by distribution.

    Raises
    ------
    UserError
        A distribution has not samples enough.
    """
    number = wanted(text)
    assert number is not None, "asked for only where samples are wanted"
    drawn: dict[int, Indices] = {}
    for group, pool in pools.items():
        if alike and drawn:
            drawn[group] = next(iter(drawn.values()))
            continue
        count = int(number) if number >= 1 else max(1, round(number * len(pool)))
        # One is left at least, to test the cluster's model on what it was not compared by.
        if count >= len(pool):
            raise UserError(
                f"proxy '{text}' asks for {count} test samples of distribution {group}, and "
                f"{max(0, len(pool) - 1)} can be spared: take fewer, or a larger test-fraction."
            )
        order = rng.permutation(pool)
        if labels.dtype.kind in "iu":
            _, firsts = np.unique(labels[order], return_index=True)
            order = np.concatenate([order[firsts], np.delete(order, firsts)])
        drawn[group] = np.sort(order[:count])
    return drawn
