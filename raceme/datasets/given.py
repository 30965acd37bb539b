"""Data given in Python as ``data=``, and CSV files: arrays, torch Datasets and tables.

A table has named columns: a pandas data frame, a CSV file, or a Dataset whose items are mappings,
as those of Hugging Face and the partitions of flwr-datasets are.
"""

from __future__ import annotations

import atexit
import csv
import fcntl
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raceme.core.config import RunConfig
from raceme.core.errors import UserError, check_known, plural
from raceme.core.options import option
from raceme.datasets import source
from raceme.datasets.npz import (
    FOUR_ARRAYS,
    LABEL_ARRAYS,
    PERIOD,
    NpzOptions,
    checked_part,
    dataset_of,
    joined,
    standardised,
)
from raceme.datasets.source import Arrays, Dataset, Source, cache_entry, cached

# -----------------------------------------------------------------------------
# Tables: columns of inputs, of labels, and of clients' names.
# -----------------------------------------------------------------------------


_USUAL = ("label", "labels", "target", "y", "class")
"""Usual names of the column of labels, which need not be stated."""


@dataclass(frozen=True)
class ColumnRoles:
    """Columns of a table."""

    target: str = option("", f"column with the labels (empty: {', '.join(_USUAL)})")
    client_id: str = option("", "column with the clients' names")
    inputs: str = option("", "columns with the inputs, separated by commas (empty: all others)")
    unit: str | None = option(None, "unit of a quantity to predict, may be empty (auto: classes)")

    def of(self, path: Path, table: Mapping[str, Any], given: Any = None) -> dict[str, Any]:
        """Return inputs and labels of a table, in the form of an .npz file.

        If `given` is a Hugging Face Dataset, the names of its classes are included.

        Raises
        ------
        UserError
            A column does not exist, is not named although several are possible, or holds text.
        """
        listed = f"{path} has the columns {', '.join(table)}"
        usual = [name for name in _USUAL if name in table]
        if not self.target and len(usual) != 1:
            raise UserError(f"{listed}: name the one with the labels, target=NAME.")
        target = self.target or usual[0]
        others = [name for name in table if name not in (target, self.client_id)]
        inputs = [name.strip() for name in self.inputs.split(",")] if self.inputs else others
        for name in (target, *inputs):
            check_known(f"column of {path}", name, table)
        arrays = [as_array(path, name, table[name]) for name in inputs]
        for name, values in zip(inputs, arrays, strict=True):
            if values.dtype.kind not in "biuf":
                text = next((value for value in values.flat if isinstance(value, str)), "")
                raise UserError(
                    f"{path}: column {name} holds no numbers ({text[:20]!r}): name the columns of "
                    "the inputs, inputs=NAME,NAME, or convert it."
                )
        if not arrays or (len(arrays) > 1 and any(values.ndim > 1 for values in arrays)):
            raise UserError(f"{listed}: name the one with the inputs, inputs=NAME.")
        # Whole numbers in columns of their own are quantities, not token ids.
        x = arrays[0] if arrays[0].ndim > 1 else np.stack(arrays, axis=1).astype(np.float64)
        found = {"x": x, "y": as_array(path, target, table[target])}
        names = getattr((getattr(given, "features", None) or {}).get(target), "names", None)
        found |= {"class_names": np.array(names)} if names else {}
        return found if self.unit is None else {**found, "unit": np.array(self.unit)}

    def by_client(
        self, path: Path, table: Mapping[str, Any], given: Any = None
    ) -> dict[str, dict[str, Any]]:
        """Return inputs and labels by client, in order of appearance."""
        if not self.client_id:
            raise UserError(
                f"{path} has the columns {', '.join(table)}: name the one with the clients' names, "
                "client-id=NAME."
            )
        check_known(f"column of {path}", self.client_id, table)
        names = np.array(list(map(str, table[self.client_id])))
        arrays = self.of(path, table, given)
        return {
            str(name): {**arrays, **{key: arrays[key][names == name] for key in ("x", "y")}}
            for name in dict.fromkeys(names)
        }


def _table_of(given: Any) -> dict[str, Any] | None:
    """Return the columns of a data frame or of a Dataset of mappings; None for others."""
    if hasattr(given, "columns") and hasattr(given, "to_numpy"):
        return {str(name): given[name].to_numpy() for name in given.columns}
    is_dataset = _is_dataset(given) and hasattr(given, "__len__")
    if not is_dataset or not len(given) or not isinstance(given[0], Mapping):
        return None
    rows = [given[index] for index in range(len(given))]
    return {str(name): [row[name] for row in rows] for name in rows[0]}


@dataclass(frozen=True)
class TableOptions(ColumnRoles, NpzOptions):
    """Location and columns of a CSV file."""


class Table(Source):
    """A CSV file with a row per sample: --dataset FILE.csv --target COLUMN --client-id COLUMN."""

    has_clients = True
    options_type = TableOptions

    def load(self, config: RunConfig) -> Dataset:
        """Return the samples of the first clients; inputs are standardised, as in `npz-folder`."""
        options = config.read(TableOptions)
        dataset = dataset_of(Path(options.data_file), self._arrays(config))
        return standardised(_first(dataset, config))

    def count_clients(self, config: RunConfig) -> int:
        """Return the number of clients in the file."""
        return len(self._arrays(config)["sizes"])

    def _arrays(self, config: RunConfig) -> Arrays:
        options = config.read(TableOptions)
        path = Path(options.data_file)
        if not options.data_file:
            raise UserError("table needs a CSV file: --dataset FILE.csv.")
        named = (options.target, options.client_id, options.inputs, options.unit)
        return cached("table", [path], named, lambda: _split(path, read_csv(path), options))


def _split(path: Path, table: Mapping[str, Any], columns: ColumnRoles, given: Any = None) -> Arrays:
    """Return the samples of all clients of one table."""
    by_client = columns.by_client(path, table, given)
    parts = {
        Path(f"{path}, {columns.client_id} {name}"): arrays for name, arrays in by_client.items()
    }
    return _of_clients(parts, list(by_client), f"clients in {path}")


def _of_clients(
    parts: Mapping[Path, Mapping[str, NDArray[Any]]], names: Sequence[str], what: str
) -> Arrays:
    """Return the checked samples of all clients, and the clients' names."""
    checked = {path: checked_part(path, arrays) for path, arrays in parts.items()}
    return {**joined(checked, what), "names": np.array(names, np.str_)}


def read_csv(path: Path) -> dict[str, NDArray[Any]]:
    """Return the columns of a CSV file with a line of names: whole numbers, numbers or text.

    Raises
    ------
    UserError
        The file cannot be read, or a line has more or fewer cells than there are names.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            names, *rows = filter(None, csv.reader(file))
    except (OSError, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or "expected a line of names and rows of cells"
        raise UserError(f"Cannot read {path} as CSV: {reason}.") from None
    for number, row in enumerate(rows, 2):
        if len(row) != len(names):
            raise UserError(
                f"{path}, row {number}: {plural(len(row), 'cell')} for the "
                f"{plural(len(names), 'column')}."
            )
    return {
        name: _numbers(np.array([row[index] for row in rows], np.str_))
        for index, name in enumerate(names)
    }


def _numbers(cells: NDArray[np.str_]) -> NDArray[Any]:
    """Return texts as whole numbers or numbers, if all are."""
    for kind in (np.int64, np.float64):
        with suppress(ValueError):
            return cells.astype(kind)
    return cells


def _first(dataset: Dataset, config: RunConfig) -> Dataset:
    """Return a dataset with the first clients only."""
    assert dataset.users is not None
    found, count = len(dataset.users), config.num_clients
    source.check_clients(config, found, f"data holds {found}. Leave clients out.")
    tested, groups, names = dataset.test_users, dataset.groups, dataset.names
    return replace(
        dataset,
        users=dataset.users[:count],
        test_users=tested and tested[:count],
        groups=groups and groups[:count],
        names=names[:count],
    )


# -----------------------------------------------------------------------------
# Data of a script or notebook, in the cache for worker processes while it runs.
# -----------------------------------------------------------------------------


_EXPECTED_CLIENT = (
    "(x, y), (x_train, y_train, x_test, y_test), a torch or Hugging Face Dataset or a data frame, "
    "or two, of which the second is for testing, or a mapping with arrays x and y"
)


@dataclass(frozen=True)
class GivenOptions:
    """Options of given arrays."""

    data_fingerprint: str = option("", "fingerprint of the arrays, which Python gives as data=")


class Given(Source):
    """Samples per client, passed in Python: raceme.run(data=...)."""

    has_clients = True
    options_type = GivenOptions

    def load(self, config: RunConfig) -> Dataset:
        """Return the unscaled samples of the first clients."""
        return _first(dataset_of(Path("data"), _kept(_GIVEN, config)), config)

    def count_clients(self, config: RunConfig) -> int:
        """Return the number of given clients."""
        return len(_kept(_GIVEN, config)["sizes"])

    def form(self, config: RunConfig) -> Dataset:
        """Return the dataset without samples, for an export after the script has ended."""
        arrays = _kept(_FORM, config)
        return replace(dataset_of(Path("data"), arrays), users=None, test_users=None, groups=None)

    def shape(self, config: RunConfig) -> source.DataShape:
        """Return the shape of the data."""
        return self.form(config).shape


def _kept(name: str, config: RunConfig) -> Arrays:
    """Return the arrays of a run, or their form, from the cache."""
    fingerprint = config.read(GivenOptions).data_fingerprint

    def missing() -> Arrays:
        raise UserError(
            f"The dataset {config.dataset} was passed by a script or notebook as data=, and the "
            f"cache in {source.cache_folder()} lacks it: run that script again."
        )

    return cached(name, (), (fingerprint,), missing)


_GIVEN, _FORM = "arrays", "form"
_FINGERPRINT = 32
"""Hexadecimal digits of the fingerprint, 128 bits."""


def keep(data: Any, columns: ColumnRoles | None = None) -> str:
    """Check the data of all clients and write them to the cache, until this process ends.

    Parameters
    ----------
    data : Mapping or Iterable
        For each client, in order or by name, ``(x, y)`` or ``(x_train, y_train, x_test, y_test)``,
        arrays or tensors; a Dataset or data frame, or two, for training and for testing; or a
        mapping with the names of an .npz file: x, y, heldout, group, num_classes, unit. Or one data
        frame or Dataset of all clients.
    columns : ColumnRoles, optional
        The columns of tables.

    Returns
    -------
    str
        Fingerprint of the data for :class:`Given`.

    Raises
    ------
    UserError
        The data have another form or are inconsistent.
    """
    arrays = _arrays_of(data, columns or ColumnRoles())
    digest = hashlib.sha256()
    for name, values in sorted(arrays.items()):
        digest.update(f"{name} {values.dtype.str} {values.shape} ".encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    fingerprint = digest.hexdigest()[:_FINGERPRINT]
    _remove_unused(source.cache_folder().glob(f"{_GIVEN}-*"))
    for _ in range(_TRIES):
        cached(_GIVEN, (), (fingerprint,), lambda: arrays)
        if _hold(cache_entry(_GIVEN, (), (fingerprint,))):
            break
    cached(_FORM, (), (fingerprint,), lambda: _form_of(arrays))
    return fingerprint


def _arrays_of(data: Any, columns: ColumnRoles) -> Arrays:
    """Return the checked samples of all clients."""
    if not isinstance(data, Mapping | list | tuple) and (table := _table_of(data)) is not None:
        return _split(Path("data"), table, columns, data)
    if not isinstance(data, Iterable):
        raise UserError(
            f"data must be a list or a mapping with {_EXPECTED_CLIENT} of each client; got an "
            f"object of type {type(data).__name__}."
        )
    named = data.items() if isinstance(data, Mapping) else enumerate(data)
    by_name = {Path(f"data[{name!r}]"): of for name, of in named}
    names = list(map(str, data)) if isinstance(data, Mapping) else []
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"data has two clients of the name {twice[0]!r}.")
    if not by_name:
        raise UserError(f"data holds no clients. Expected of each: {_EXPECTED_CLIENT}.")
    parts = {path: _arrays(path, of, columns) for path, of in by_name.items()}
    return _of_clients(parts, names, "clients in data")


def _form_of(arrays: Arrays) -> Arrays:
    """Return the arrays of a dataset without samples, with the scale of a quantity."""
    target = dataset_of(Path("data"), arrays).target
    found = {**arrays, "sizes": np.zeros(0, np.int64), "groups": np.zeros(0, np.int64)}
    found |= {name: arrays[name][:0] for name in ("x", "y", "test", "names")}
    return found if target is None else {**found, "scale": np.array([target.mean, target.std])}


_held: dict[Path, int] = {}
"""Locked copies of this process, which other processes with the same data share."""


_TRIES = 100
"""Attempts to lock a copy that others remove."""


def _hold(folder: Path) -> bool:
    """Lock a copy until the end of the process, which then removes it.

    Return whether it exists: another thread or process may remove it before it is locked.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    with suppress(OSError):
        # Waits until another process has removed it.
        fcntl.flock(handle, fcntl.LOCK_SH)
        if os.path.samestat(os.fstat(handle), folder.stat()):
            unused, _held[folder] = _held.get(folder), handle
            if unused is not None:
                os.close(unused)
            return True
    os.close(handle)
    return False


@atexit.register
def _release() -> None:
    for handle in _held.values():
        os.close(handle)
    _remove_unused(_held)


def _remove_unused(folders: Iterable[Path]) -> None:
    """Remove the copies that no process holds, e.g. of processes that were killed."""
    for folder in folders:
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(handle)


def _arrays(path: Path, given: Any, columns: ColumnRoles) -> dict[str, NDArray[Any]]:
    """Return the arrays of one client by name."""
    if isinstance(given, Mapping) and given.keys() == {"train", "test"}:
        given = (given["train"], given["test"])
    if isinstance(given, tuple | list) and len(given) == 2 and all(map(_is_samples, given)):
        train, test = (_samples(path, part, columns) for part in given)
        pairs = zip(FOUR_ARRAYS, (train["x"], train["y"], test["x"], test["y"]), strict=True)
        given = {**train, **dict(pairs)}
        del given["x"], given["y"]
    elif _is_samples(given):
        given = _samples(path, given, columns)
    if isinstance(given, tuple | list) and len(given) in (2, 4):
        given = dict(zip(("x", "y") if len(given) == 2 else FOUR_ARRAYS, given, strict=True))
    if not isinstance(given, Mapping):
        raise UserError(
            f"{path} must be {_EXPECTED_CLIENT}; got an object of type {type(given).__name__}."
        )
    needed = ("x", "y") if "x" in given else FOUR_ARRAYS
    others = {"heldout", "group", PERIOD, "class_names", *LABEL_ARRAYS}
    unknown = given.keys() - {*needed, *others}
    if unknown or (missing := [name for name in needed if name not in given]):
        problem = f"has {sorted(map(str, unknown))[0]}" if unknown else f"lacks {missing[0]}"
        raise UserError(f"{path} {problem}. Expected: {_EXPECTED_CLIENT}.")
    return {name: as_array(path, name, values) for name, values in given.items()}


def _is_samples(given: Any) -> bool:
    """Return whether an object is a Dataset or a data frame."""
    return _is_dataset(given) or hasattr(given, "columns")


def _is_dataset(given: Any) -> bool:
    """Return whether an object is a Dataset: it has items and is no array."""
    known = isinstance(given, list | tuple | str | Mapping) or hasattr(given, "__array__")
    return hasattr(given, "__getitem__") and not known


def _samples(path: Path, given: Any, columns: ColumnRoles) -> dict[str, NDArray[Any]]:
    """Return the inputs and the labels of a Dataset or a data frame."""
    try:
        if (table := _table_of(given)) is None:
            pairs = [given[index] for index in range(len(given))]
            xs, ys = zip(*pairs, strict=True) if pairs else ((), ())
            return {"x": as_array(path, "x", xs), "y": as_array(path, "y", ys)}
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{path} must be a Dataset of pairs (x, y) of one shape, with a length: {error}."
        ) from None
    return columns.of(path, table, given)


def as_array(path: Path, name: str, values: Any) -> NDArray[Any]:
    """Convert a tensor, a list of tensors, images or numbers, or a column to an array."""
    try:
        if isinstance(values, list | tuple):
            values = [_item(value) for value in values]
        array = np.asarray(_item(values))
        if array.dtype.kind in "OT" and all(isinstance(value, str) for value in array.flat):
            array = array.astype(np.str_)
        return array
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{path}: {name} is no array: {str(error).rstrip('.')}.") from None


def _item(value: Any) -> Any:
    """Return a tensor or an image as an array, the channels of an image first."""
    if hasattr(value, "detach"):
        return value.detach().cpu().numpy()
    if hasattr(value, "getbands"):
        pixels = np.asarray(value)
        return np.moveaxis(pixels, -1, 0) if pixels.ndim > 2 else pixels
    return value
