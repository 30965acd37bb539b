"""Text by role or author: the next character from those before it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.config.options import option
from raceme.datasets import npz
from raceme.datasets.archive import read_arrays
from raceme.datasets.cache import Arrays, cached
from raceme.datasets.source import Dataset, Indices, Source

_EXPECTED = (
    "Expected in it: text, uint8 of shape (characters,), and offset, whole numbers of shape "
    "(roles + 1,): role i said text[offset[i]:offset[i + 1]]"
)
_INNER = ("", "shakespeare_by_role")
"""Folders that are looked for under data-root."""


@dataclass(frozen=True)
class TextOptions:
    """How text becomes samples; the length is that of LEAF's Shakespeare."""

    text_length: int = option(80, "characters that the next one is told from", low=1)
    text_step: int = option(80, "characters from one sample to the next", low=1)


class Text(Source):
    """Text by role, a client for each: the next character from 80 (an .npz under data-root)."""

    default_model = None
    default_lr = 0.5
    target_accuracy = 0.4
    default_clients = 100
    has_clients = True
    options_type = TextOptions

    def load(self, config: RunConfig) -> Dataset:
        """Return the samples of the roles that say most; what a role says last is for testing."""
        path, arrays, roles = self._roles(config)
        options = config.read(TextOptions)
        if len(roles) < config.num_clients:
            raise UserError(
                f"Too many clients: {config.num_clients}, but only {len(roles)} roles in {path} "
                f"have text for a sample to train with and one to test with. Take fewer clients."
            )
        starts, users, test_users = [], [], []
        count = 0
        for role in roles[: config.num_clients].tolist():
            first, last = arrays["offset"][role], arrays["offset"][role + 1]
            train, test = _starts(int(last - first), config.test_fraction, options)
            starts += [first + train, first + test]
            users.append(np.arange(count, count + len(train)))
            test_users.append(users[-1][-1] + 1 + np.arange(len(test)))
            count += len(train) + len(test)
        at = np.concatenate(starts)
        symbols = arrays["symbols"]
        return Dataset(
            # A copy: what overlaps in the text does not in the samples.
            x=sliding_window_view(symbols, options.text_length)[at],
            y=symbols[at + options.text_length].astype(np.int64),
            num_classes=int(arrays["vocabulary"]),
            users=tuple(users),
            test_users=tuple(test_users),
            tokens=int(arrays["vocabulary"]),
        )

    def count_clients(self, config: RunConfig) -> int:
        """Return 100, or all roles with text enough where there are fewer."""
        return max(1, min(self.default_clients, len(self._roles(config)[2])))

    def _roles(self, config: RunConfig) -> tuple[Path, Arrays, Indices]:
        """Return the file, its text, and the roles with text enough, the most talkative first."""
        path = self._file(config)
        arrays = cached("text", [path], (1,), lambda: _read(path))
        lengths = np.diff(arrays["offset"])
        options = config.read(TextOptions)
        order = np.argsort(-lengths, kind="stable")
        enough = [
            min(map(len, _starts(int(lengths[role]), config.test_fraction, options))) > 0
            for role in order
        ]
        return path, arrays, order[enough]

    def _file(self, config: RunConfig) -> Path:
        if not config.data_root:
            raise UserError(f"text needs the folder with one .npz file: --data-root. {_EXPECTED}.")
        root = Path(config.data_root)
        for inner in _INNER:
            found = sorted((root / inner).glob("*.npz"))
            if len(found) == 1:
                return found[0]
        raise UserError(f"text needs one .npz file in {root}, and there is not one. {_EXPECTED}.")


def _starts(length: int, test_fraction: float, options: TextOptions) -> tuple[Indices, Indices]:
    """Return where training and test samples begin in so many characters; they do not overlap."""
    cut = int(length * (1.0 - test_fraction))
    train = np.arange(0, cut - options.text_length, options.text_step)
    test = np.arange(cut, length - options.text_length, options.text_step)
    return train, test


def _read(path: Path) -> Arrays:
    """Read the text; its characters are numbered from 0 in the order of their codes."""
    with npz.explained(path, _EXPECTED):
        arrays = read_arrays(path, ("text", "offset"))
    missing = {"text", "offset"} - arrays.keys()
    if missing:
        raise UserError(f"{path} lacks {', '.join(sorted(missing))}. {_EXPECTED}.")
    text, offset = arrays["text"], arrays["offset"]
    if not _fit(text, offset):
        raise UserError(
            f"{path} does not fit together: text is {text.dtype} of shape {text.shape}, offset "
            f"{offset.dtype} of shape {offset.shape}. {_EXPECTED}."
        )
    codes, symbols = np.unique(text, return_inverse=True)
    return {
        "symbols": symbols.astype(np.uint8),
        "offset": offset.astype(np.int64),
        "vocabulary": np.array(len(codes)),
    }


def _fit(text: NDArray[np.generic], offset: NDArray[np.generic]) -> bool:
    if text.dtype != np.uint8 or text.ndim != 1 or offset.dtype.kind not in "iu":
        return False
    if offset.ndim != 1 or len(offset) < 2:
        return False
    bounds = offset.astype(np.int64)
    return bool(np.all(np.diff(bounds) >= 0) and bounds[0] >= 0 and bounds[-1] <= len(text))
