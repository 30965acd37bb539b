"""What a server has of each distribution: proxy sets, test sets, samples to pre-train with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raceme.config.errors import UserError
from raceme.datasets.archive import read_arrays
from raceme.datasets.dealt import Dealt
from raceme.datasets.labels import (
    LABEL_ARRAYS,
    Quantity,
    checked_targets,
    common_quantity,
    described,
    quantity_of,
    standardised_labels,
    target_of,
)
from raceme.datasets.npz import checked_inputs, explained
from raceme.datasets.source import DataShape, Indices, Labels, generator

_EXPECTED = (
    "Expected: x, numbers of shape (samples, ...), and y, whole numbers from 0 of shape "
    "(samples,), or for a quantity numbers, unit, a text, and optionally y_mean and y_std; "
    "optionally x_test and y_test, and to pre-train with x_train and y_train"
)

_SUFFIXES = {"proxy": "", "test": "_test", "train": "_train"}
"""Of the names x and y, for each part of a file."""


@dataclass(frozen=True, eq=False)
class Held:
    """Samples that a server has of one distribution.

    Attributes
    ----------
    x : NDArray[np.float32]
        Inputs, shape (n, ...).
    y : Labels
        Classes, int64, or the standardised quantity, float32, shape (n,).
    """

    x: NDArray[np.float32]
    y: Labels


@dataclass(frozen=True)
class ProxySets:
    """Samples on which a server measures models, of each distribution in order.

    Attributes
    ----------
    proxies : tuple[Held, ...]
        What clients' models are measured on. No client has any of them.
    tests : tuple[Held, ...]
        What the clusters' models are tested on, for reports; empty where there are none.
    """

    proxies: tuple[Held, ...]
    tests: tuple[Held, ...]


def proxies_from_clients(dealt: Dealt) -> ProxySets:
    """Take a server's proxy sets from the test samples of a simulation's clients.

    Raises
    ------
    UserError
        There are no groups, not samples enough, or a proxy set misses a class.
    """
    proxies, tests = [], []
    remaining = dealt.pools(lambda client: dealt.indices(client)[1])
    for group, own in dealt.reserve.items():
        proxies.append(_seen(dealt, own, group, "proxy"))
        tests.append(_seen(dealt, remaining[group], group, "test"))
        if dealt.dataset.target is None:
            _check_classes(proxies[-1].y, tests[-1].y, group, dealt.config.proxy)
    return ProxySets(tuple(proxies), tuple(tests))


def pretraining_from_clients(dealt: Dealt, count: int) -> tuple[Held, ...]:
    """Take samples to pre-train with from the training samples of a simulation's clients.

    Raises
    ------
    UserError
        There are no groups, or not samples enough.
    """
    rng = generator(dealt.config.seed, "pretrain")
    held = []
    for group, pool in dealt.pools(lambda client: dealt.indices(client)[0]).items():
        if count > len(pool):
            raise UserError(
                f"pretrain {count} is more than the {len(pool)} training samples of "
                f"distribution {group}."
            )
        own = np.sort(rng.choice(pool, count, replace=False))
        held.append(_seen(dealt, own, group, "pretrain"))
    return tuple(held)


def _seen(dealt: Dealt, own: Indices, group: int, part: str) -> Held:
    """Return samples as the clients of a group see them."""
    # Where a group adds noise it is nobody's of the clients'.
    nobody = dealt.clients + group
    return Held(dealt.inputs(own, group, nobody, part), dealt.labels(own, group))


def _check_classes(has: Labels, expected: Labels, group: int, text: str) -> None:
    missing = np.setdiff1d(expected, has)
    if len(missing):
        raise UserError(
            f"The proxy set of distribution {group} misses class {missing[0]}, which its test "
            f"samples have: with proxy '{text}' it holds {len(has)} samples. Take more."
        )


def proxies_from_folder(folder: Path, shape: DataShape) -> ProxySets:
    """Read a server's proxy sets: an .npz file for each cluster, in order of name.

    Raises
    ------
    UserError
        There are none, or one is not what it should be.
    """
    files = _files(folder, shape)
    for path, file in files.items():
        missing = np.setdiff1d(np.arange(shape.num_classes), file["proxy"].y)
        if len(missing):
            raise UserError(
                f"{path}: y misses class {missing[0]}: what a model gets wrong of it would not be "
                "seen. Add samples of each class."
            )
    has_tests = all("test" in file for file in files.values())
    return ProxySets(
        tuple(file["proxy"] for file in files.values()),
        tuple(file["test"] for file in files.values()) if has_tests else (),
    )


def pretraining_from_folder(folder: Path, shape: DataShape, count: int) -> tuple[Held, ...]:
    """Read the first samples to pre-train with, of the same files.

    Raises
    ------
    UserError
        A file has none, or is not what it should be.
    """
    files = _files(folder, shape)
    for path, file in files.items():
        if "train" not in file:
            raise UserError(f"{path} lacks x_train and y_train, which pretrain needs. {_EXPECTED}.")
    own = [file["train"] for file in files.values()]
    return tuple(Held(samples.x[:count], samples.y[:count]) for samples in own)


def shape_of_folder(folder: Path) -> DataShape:
    """Return what the samples of the first file in a folder say that a model has to fit.

    Raises
    ------
    UserError
        There is none, or it is not what it should be.
    """
    file = _read(_paths(folder)[0])
    samples, target = file.parts["proxy"], target_of(file.quantity)
    # Each class is in it: from_folder checks that.
    classes = int(samples.y.max()) + 1 if target is None else 0
    return DataShape(tuple(samples.x.shape[1:]), classes, target=target)


def _paths(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("*.npz"))
    if not paths:
        raise UserError(f"proxy {folder} must be a folder with an .npz file for each cluster.")
    return paths


def _files(folder: Path, shape: DataShape) -> dict[Path, dict[str, Held]]:
    """Read all files of a folder, and see that models for a shape can be measured on them."""
    files = {path: _read(path) for path in _paths(folder)}
    target = target_of(common_quantity({path: file.quantity for path, file in files.items()}))
    if target != shape.target:
        raise UserError(
            f"proxy {folder}: its files must say the same of their labels as the clients' data, "
            f"{described(shape.target)}; got {described(target)}."
        )
    for path, file in files.items():
        _check_shape(path, file.parts, shape)
    return {
        path: {
            part: Held(samples.x, standardised_labels(path, samples.y, target))
            for part, samples in file.parts.items()
        }
        for path, file in files.items()
    }


def _check_shape(path: Path, parts: Mapping[str, Held], shape: DataShape) -> None:
    """Raise UserError if samples are none that a model for this shape can be measured on."""
    for part, samples in parts.items():
        x, y = samples.x, samples.y
        if x.shape[1:] != shape.input_shape:
            raise UserError(
                f"{path}: x{_SUFFIXES[part]} must hold samples of shape {shape.input_shape}, as "
                f"all others; got {x.shape[1:]}."
            )
        if shape.target is None and y.max() >= shape.num_classes:
            raise UserError(
                f"{path}: y{_SUFFIXES[part]} must hold labels below {shape.num_classes}, as all "
                f"others; got labels up to {y.max()}."
            )


@dataclass(frozen=True)
class _File:
    """Parts of a file, of which labels that are a quantity are in its unit."""

    parts: dict[str, Held]
    quantity: Quantity | None


def _read(path: Path) -> _File:
    """Read and check one file: proxies, and tests and training samples if it has some."""
    with explained(path, _EXPECTED):
        samples = {f"{part}{end}" for part in "xy" for end in _SUFFIXES.values()}
        arrays = read_arrays(path, {*samples, *LABEL_ARRAYS})
    quantity = quantity_of(path, arrays)
    found: dict[str, Held] = {}
    for part, suffix in _SUFFIXES.items():
        names = f"x{suffix}", f"y{suffix}"
        if not all(name in arrays for name in names):
            if part == "proxy" or any(name in arrays for name in names):
                raise UserError(f"{path} lacks {' or '.join(names)}. {_EXPECTED}.")
            continue
        x = checked_inputs(path, names[0], arrays[names[0]])
        y = checked_targets(path, names[1], arrays[names[1]], len(x), quantity)
        found[part] = Held(x, y)
    return _File(found, quantity)
