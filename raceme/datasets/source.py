"""Datasets, their sources, and helpers of sources.

In this order: datasets and sources, helpers of sources, the two sources without files, and the
cache.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from tokenize import TokenError
from types import ModuleType
from typing import IO, Any, TypeVar
from zipfile import BadZipFile, ZipFile
from zlib import crc32
from zlib import error as ZlibError  # noqa: N812

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from raceme.core.config import RunConfig
from raceme.core.errors import UserError, os_errors_as_user_errors, plural
from raceme.core.files import ReadingError, check_memory, check_regular
from raceme.core.options import option
from raceme.core.registry import explained

Indices = NDArray[np.int64]
"""Positions of samples in a dataset."""
Labels = NDArray[Any]
"""Classes, int64, or quantities, float32."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class Target:
    """The quantity predicted by a regression, whose standardised values are the labels.

    Attributes
    ----------
    unit : str
        Unit of the quantity, in which errors are reported: ``"µg/m³"``.
    mean, std : float
        A label is (quantity − mean) / std.
    """

    unit: str
    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class DataShape:
    """The shape of data for a model.

    Attributes
    ----------
    input_shape : tuple[int, ...]
        Shape of one input, without the axis of samples.
    num_classes : int
        Number of classes; 0 for a regression.
    tokens : int
        Size of the vocabulary for token ids, shape (length,); 0 for quantities.
    target : Target or None
        Target of a regression; None for a classification.
    """

    input_shape: tuple[int, ...]
    num_classes: int
    tokens: int = 0
    target: Target | None = None

    @property
    def outputs(self) -> int:
        """Number of outputs of a model: a score for each class, or the predicted quantity."""
        return self.num_classes if self.target is None else 1


@dataclass(frozen=True)
class Dataset:
    """Samples of all clients together.

    Attributes
    ----------
    x : NDArray
        Inputs, shape (N, ...): float32, or float16, uint8 or token ids, which :meth:`inputs`
        converts on demand.
    y : Labels
        Labels, shape (N,): classes, int64, from 0 to ``num_classes - 1``, or for a regression the
        standardised quantity, float32; NaN where there is none.
    num_classes : int
        Number of classes; 0 for a regression.
    mean, std : float or NDArray
        Normalisation by :meth:`inputs`, for uint8 after scaling to [0, 1]; arrays are broadcastable
        to one input.
    users : tuple[Indices, ...] or None
        Samples of each client if the data come with clients; None if a partitioner assigns them.
    test_users : tuple[Indices, ...] or None
        Test samples of each of these clients, if given; `users` are then for training.
    groups : tuple[int or None, ...] or None
        True group of each of these clients, if given.
    tokens : int
        Size of the vocabulary if `x` has token ids, which :meth:`inputs` does not change; else 0.
    periods : Indices or None
        Period of each sample, from 0, shape (N,), if known, for the drift ``in-order``.
    target : Target or None
        Target of a regression.
    labels : tuple[str, ...]
        Names of the classes; empty where they have numbers only.
    names : tuple[str, ...]
        Names of the clients if the data come with clients; empty where they have numbers only.
    """

    x: NDArray[np.generic]
    y: Labels
    num_classes: int
    mean: float | NDArray[np.float32] = 0.0
    std: float | NDArray[np.float32] = 1.0
    users: tuple[Indices, ...] | None = None
    test_users: tuple[Indices, ...] | None = None
    groups: tuple[int | None, ...] | None = None
    tokens: int = 0
    periods: Indices | None = None
    target: Target | None = None
    labels: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.names:
            return
        from raceme.core.messages import LONGEST_NAME, name_of

        # A server refuses a client of another name, as it does an unknown device.
        for name in self.names:
            if name_of(name) is None:
                raise UserError(
                    f"The client {name!r} needs another name: 1 to {LONGEST_NAME} printable "
                    "characters. Rename its file, or its key."
                )

    @property
    def shape(self) -> DataShape:
        """The shape of data for a model."""
        return DataShape(tuple(self.x.shape[1:]), self.num_classes, self.tokens, self.target)

    @property
    def blank(self) -> NDArray[np.float32]:
        """Normalised value of an empty image, broadcastable to one input."""
        return np.asarray(-np.asarray(self.mean) / np.asarray(self.std), np.float32)

    def inputs(self, indices: Indices) -> NDArray[np.float32]:
        """Return the normalised inputs of some samples (copied)."""
        values = self.x[indices].astype(np.float32, copy=False)
        if self.tokens:
            return values
        if self.x.dtype == np.uint8:
            values /= np.float32(255)
        values -= np.asarray(self.mean, np.float32)
        values /= np.asarray(self.std, np.float32)
        return values


@dataclass(frozen=True)
class ClientData:
    """One client's own samples.

    Attributes
    ----------
    x_train, x_test : NDArray[np.float32]
        Inputs, shape (n, ...).
    y_train, y_test : Labels
        Labels, shape (n,), as in :class:`Dataset`.
    group : int or None
        True group of the client, if any; only for reporting purity.
    mixture : tuple[float, ...] or None
        Share of each group's distribution in these samples, if a mixture; only for reports.
    all_training : int or None
        Final number of training samples if they are released step by step, else None.
    """

    x_train: NDArray[np.float32]
    y_train: Labels
    x_test: NDArray[np.float32]
    y_test: Labels
    group: int | None
    mixture: tuple[float, ...] | None = None
    all_training: int | None = None


@dataclass(frozen=True)
class Defaults:
    """Defaults of a run on a dataset; None stands for one suited to the shape of the data.

    Attributes
    ----------
    model : str or None
        Network.
    lr : float or None
        Learning rate.
    target_accuracy : float or None
        Target mean client accuracy; for a regression, the mean absolute error.
    """

    model: str | None = None
    lr: float | None = field(default=None, metadata={"above": 0})
    target_accuracy: float | None = field(default=None, metadata={"above": 0})


class Source:
    """Base class of the sources of datasets.

    Attributes
    ----------
    default_model : str or None
        Default network; None stands for one suited to the inputs' shape, with its own learning
        rate.
    default_lr : float
        Default learning rate.
    default_clients : int
        Default number of clients.
    has_clients : bool
        Whether the data come with clients, so that no partition applies.
    normalises : bool
        Whether inputs are normalised; otherwise they are used as the files have them.
    target_accuracy : float
        Target mean client accuracy; for a regression, the mean absolute error.
    fixed_shape : DataShape or None
        Shape of the data, if known without files.
    options_type : type or None
        Frozen dataclass of the source's options: ``config.read(options_type)``.
    """

    default_model: str | None = None
    default_lr: float = 0.05
    target_accuracy: float = 0.9
    default_clients: int = 40
    has_clients: bool = False
    normalises: bool = True
    fixed_shape: DataShape | None = None
    options_type: type[Any] | None = None

    def load(self, config: RunConfig) -> Dataset:
        """Read or generate the samples of all clients.

        Raises
        ------
        UserError
            Files are missing or invalid.
        """
        raise TypeError(f"{type(self).__name__} does not define load().")

    def shape(self, config: RunConfig) -> DataShape:
        """Return the shape of the data, if possible without loading.

        The configuration's number of clients may be open.
        """
        if self.fixed_shape is not None:
            return self.fixed_shape
        clients = self.count_clients(config) if config.clients is None else config.clients
        return self.load(config.with_values(clients=clients)).shape

    def defaults(self, config: RunConfig) -> Defaults:
        """Return the defaults of a run.

        Raises
        ------
        UserError
            They are stated in a file that is invalid.
        """
        if self.default_model is None:
            return Defaults()
        return Defaults(self.default_model, self.default_lr, self.target_accuracy)

    def form(self, config: RunConfig) -> Dataset | None:
        """Return a dataset without samples, if known without loading; else None."""
        return None

    def is_elsewhere(self, config: RunConfig) -> bool:
        """Return whether only the clients have data."""
        return False

    def count_clients(self, config: RunConfig) -> int:
        """Return the default number of clients.

        Raises
        ------
        UserError
            The data are needed and missing.
        """
        return self.default_clients

    def for_client(self, config: RunConfig, client: int) -> RunConfig:
        """Narrow a configuration to one client's data, if possible."""
        return config


class Loaded(Source):
    """The source of a user's function that returns a dataset.

    Parameters
    ----------
    name : str
        Name of the dataset in a run's configuration.
    function : Callable
        Function of the configuration that returns a `Dataset`.
    """

    def __init__(self, name: str, function: Callable[[RunConfig], Dataset]) -> None:
        self._name, self._function = name, function

    def load(self, config: RunConfig) -> Dataset:
        """Return the function's dataset, after checking it.

        Raises
        ------
        UserError
            The function returns another type, arrays that do not fit each other, too few clients,
            or clients where a partition is given.
        """
        found = self._found(config)
        if found.users is not None and config.partition != RunConfig().partition:
            raise UserError(
                f"partition is not read with dataset {self._name}, which comes with clients: leave "
                "it out."
            )
        if found.users is not None and config.num_clients > len(found.users):
            raise UserError(
                f"Dataset '{self._name}' has {plural(len(found.users), 'client')}, and clients is "
                f"{config.num_clients}: give at most as many."
            )
        return found

    def _found(self, config: RunConfig) -> Dataset:
        found: object = self._function(config)
        if not isinstance(found, Dataset):
            raise UserError(
                f"Dataset '{self._name}' must return a raceme.datasets.Dataset, got "
                f"{type(found).__name__}."
            )
        if wrong := _misfit(found):
            raise UserError(f"Dataset '{self._name}': {wrong}.")
        return found

    def count_clients(self, config: RunConfig) -> int:
        """Return the data's number of clients, if any."""
        users = self._found(config.with_values(clients=self.default_clients)).users
        return self.default_clients if users is None else len(users)

    def comes_with_clients(self, config: RunConfig) -> bool:
        """Return whether the data come with clients."""
        return self._found(config).users is not None


def _misfit(dataset: Dataset) -> str:
    """Return the error in a user's dataset; empty if there is none."""
    x, y = dataset.x, dataset.y
    if not (isinstance(x, np.ndarray) and isinstance(y, np.ndarray)):
        return f"x and y must be numpy arrays, got {type(x).__name__} and {type(y).__name__}"
    if len(x) != len(y):
        return f"x has {plural(len(x), 'sample')} and y {len(y)}"
    if dataset.num_classes:
        if y.dtype != np.int64:
            return f"y must have dtype int64 where there are classes, got {y.dtype}"
        if len(y) and not 0 <= y.min() <= y.max() < dataset.num_classes:
            return f"labels must be from 0 to {dataset.num_classes - 1}, got {y.min()} to {y.max()}"
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        return "x has values that are not finite"
    users = dataset.users
    for name in ("test_users", "groups"):
        of = getattr(dataset, name)
        if users is not None and of is not None and len(of) != len(users):
            return f"{name} has a length of {len(of)}, and there are {len(users)} users"
    for own in (*(users or ()), *(dataset.test_users or ())):
        if len(own) and not 0 <= np.min(own) <= np.max(own) < len(x):
            return f"clients have samples {np.min(own)} to {np.max(own)}, of {len(x)}"
    return ""


def generator(seed: int, purpose: str, client: int = 0) -> np.random.Generator:
    """Return the random generator for one purpose, independent of all others of the same seed."""
    entropy = [seed, crc32(purpose.encode()), client]
    return np.random.default_rng(np.random.SeedSequence(entropy))


# -----------------------------------------------------------------------------
# Reproducible process-wide random numbers, for users' code that draws from them.
#
# Apps, networks and datasets may draw from the process-wide generators of Python, numpy and torch.
# Simulated clients and the server share processes; the draws of one must not depend on the others.
# -----------------------------------------------------------------------------


def seed_process(entropy: Sequence[int]) -> None:
    """Seed Python's, numpy's and, if it is loaded, torch's generator of this process."""
    words = [int(word) for word in np.random.SeedSequence(entropy).generate_state(3)]
    random.seed(words[0])
    np.random.seed(words[1])
    torch = sys.modules.get("torch")
    if torch is not None:
        # `torch.manual_seed` takes a millisecond where there is no GPU: it records the call's
        # trace.
        torch.default_generator.manual_seed(words[2])
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(words[2])


@contextmanager
def own_randomness(entropy: Sequence[int]) -> Iterator[None]:
    """Seed the process's generators within the context, and restore their states afterwards."""
    torch = sys.modules.get("torch")
    states = random.getstate(), np.random.get_state()
    drawn = torch.get_rng_state() if torch is not None else None
    seed_process(entropy)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch is not None:
            torch.set_rng_state(drawn)


# -----------------------------------------------------------------------------
# Helpers of sources: files that may be missing, samples of each client.
# -----------------------------------------------------------------------------


def find_under(
    config: RunConfig,
    name: str,
    folders: Sequence[str],
    find: Callable[[Path], Found | None],
    expected: str,
    hint: str = "",
    files: str = "its files",
) -> Found:
    """Return the content of the first suitable folder under data-root.

    Parameters
    ----------
    config : RunConfig
        Its ``data_root`` names the root folder.
    name : str
        Name of the dataset, for error messages.
    folders : Sequence[str]
        Folders under the root, in the order in which they are searched.
    find : Callable
        Returns the content of a folder; None or empty if there is none.
    expected : str
        Required content of the root, for error messages.
    hint : str
        Text at the end of error messages, for example how to get the files.
    files : str
        Description of the files, for the error message without a root.

    Raises
    ------
    UserError
        No root is given, or no folder is suitable.
    """
    end = f" {hint}" if hint else ""
    if not config.data_root:
        raise UserError(
            f"{name} needs the folder with {files}: --data-root DIR. It must hold {expected}.{end}"
        )
    for inner in folders:
        if found := find(Path(config.data_root) / inner):
            return found
    raise UserError(
        f"{name} is not under '{config.data_root}': expected {expected}: --data-root DIR.{end}"
    )


def all_of(files: Sequence[str]) -> Callable[[Path], list[Path]]:
    """Return a finder of several files, which returns all of them or nothing."""

    def find(folder: Path) -> list[Path]:
        found = [folder / file for file in files]
        return found if all(file.is_file() for file in found) else []

    return find


def existing(folder: Path) -> Path | None:
    """Return a folder if there is one."""
    return folder if folder.is_dir() else None


def check_clients(config: RunConfig, count: int, there: str) -> None:
    """Raise UserError if a run has more clients than the data; `there` states their number."""
    if count < config.num_clients:
        raise UserError(f"Too many clients: {config.num_clients}, but {there}")


def spans(sizes: Iterable[int]) -> list[Indices]:
    """Return consecutive ranges of positions with the given sizes."""
    return [np.arange(start, end) for start, end in pairwise(np.cumsum([0, *sizes]).tolist())]


def by_test(
    members: Sequence[Indices], test: NDArray[np.bool_] | None
) -> tuple[tuple[Indices, ...], tuple[Indices, ...] | None]:
    """Split each client's samples into training and test samples.

    Parameters
    ----------
    members : Sequence[Indices]
        Positions of each client's samples in the dataset.
    test : NDArray or None
        Mask of test samples, shape (N,); None if not defined.
    """
    if test is None:
        return tuple(members), None
    return tuple(own[~test[own]] for own in members), tuple(own[test[own]] for own in members)


# -----------------------------------------------------------------------------
# Defaults by shape of the data: network, learning rate, target.
# -----------------------------------------------------------------------------


SPECTRUM = 512
"""Minimum length of vectors treated as a spectrum or wave instead of features."""
_SMALLEST_IMAGE = 4
_TARGET_ERROR = 0.25
"""Default target error of a regression, in standard deviations."""


def suited(shape: DataShape) -> tuple[str, float]:
    """Return the name of a network for inputs of a shape, and a learning rate for it.

    Token ids are for ``gru``; (channels, height, width) is an image, for ``cnn``; two axes are a
    window of sensor readings and a long vector is a spectrum or a wave, for ``cnn1d``; everything
    else is for ``mlp``.
    """
    size = shape.input_shape
    if shape.tokens:
        return "gru", 0.5
    if len(size) == 3 and min(size[1:]) >= _SMALLEST_IMAGE:
        return "cnn", 0.01
    if len(size) == 2 or (len(size) == 1 and size[0] >= SPECTRUM):
        return "cnn1d", 0.05
    return "mlp", 0.05


def suited_target(shape: DataShape, accuracy: float) -> float:
    """Return the default target: an accuracy, or the mean absolute error of a quantity."""
    return accuracy if shape.target is None else float(f"{_TARGET_ERROR * shape.target.std:.2g}")


# -----------------------------------------------------------------------------
# Synthetic(alpha, beta): clients that differ in their model and in their inputs.
#
# Shamir, Srebro and Zhang 2014, as generalised by Li et al. 2020 (FedProx, section 5.1) and used in
# LEAF. For client k, with every N(mean, standard deviation) as in the authors' code::
#
#     u_k ~ N(0, alpha)   W_k, b_k ~ N(u_k, 1)             the client's own linear model
#     B_k ~ N(0, beta)   v_k ~ N(B_k, 1)                  the centre of its inputs
#     x ~ N(v_k, S),  S_jj = j^(-1.2)   y = argmax softmax(W_k x + b_k)
# -----------------------------------------------------------------------------


FEATURES = 60
CLASSES = 10
_SMALLEST = 50


@dataclass(frozen=True)
class SyntheticOptions:
    """Options of ``synthetic``."""

    synthetic_alpha: float = option(1.0, "alpha: how much the clients' models differ", low=0)
    synthetic_beta: float = option(1.0, "beta: how much the clients' inputs differ", low=0)
    synthetic_most: int = option(
        1000, "maximum samples per client: 1000 in LEAF, unbounded in FedProx", low=50
    )


class Synthetic(Source):
    """Synthetic(alpha, beta) of FedProx and LEAF: 60 features, 10 classes, unequal clients."""

    default_model = "mclr"
    default_lr = 0.01
    target_accuracy = 0.6
    default_clients = 30
    has_clients = True
    fixed_shape = DataShape((FEATURES,), CLASSES)
    options_type = SyntheticOptions

    def load(self, config: RunConfig) -> Dataset:
        """Generate every client's samples; a client's do not depend on the number of clients."""
        options = config.read(SyntheticOptions)
        alpha, beta = options.synthetic_alpha, options.synthetic_beta
        clients = []
        for client in range(config.num_clients):
            rng = generator(config.seed, "synthetic", client)
            clients.append(client_samples(alpha, beta, rng, options.synthetic_most))
        return Dataset(
            x=np.concatenate([x for x, _ in clients]),
            y=np.concatenate([y for _, y in clients]),
            num_classes=CLASSES,
            users=tuple(spans(len(y) for _, y in clients)),
        )


def client_samples(
    alpha: float, beta: float, rng: np.random.Generator, most: int = 1000
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Generate one client's samples.

    Parameters
    ----------
    alpha : float
        How far the clients' models differ.
    beta : float
        How far the clients' inputs differ.
    rng : np.random.Generator
        Generator of this client alone, so that clients do not depend on each other.
    most : int
        Maximum number of samples.

    Returns
    -------
    tuple[NDArray[np.float32], NDArray[np.int64]]
        Inputs, shape (n, 60), and labels, shape (n,). n is 50 plus a log-normal number with a
        heavy tail (median 55), as in the authors' code, and at most `most`, as in LEAF's.
    """
    count = min(_SMALLEST + int(rng.lognormal(4.0, 2.0)), most)
    model_mean = rng.normal(0.0, alpha)
    weights = rng.normal(model_mean, 1.0, (FEATURES, CLASSES))
    bias = rng.normal(model_mean, 1.0, CLASSES)
    centre = rng.normal(rng.normal(0.0, beta), 1.0, FEATURES)
    deviation = np.arange(1, FEATURES + 1) ** -0.6  # the root of the variance j^(-1.2)
    x = rng.normal(centre, deviation, (count, FEATURES))
    # The largest score has the largest softmax.
    y = np.argmax(x @ weights + bias, axis=1)
    return x.astype(np.float32), y.astype(np.int64)


# -----------------------------------------------------------------------------
# scikit-learn's handwritten digits: 1,797 images of 8x8 pixels.
# -----------------------------------------------------------------------------


_BRIGHTEST = 16.0
_MEAN = 0.3053
_STD = 0.3760


class Digits(Source):
    """Digits: 1,797 handwritten digits, 8x8 pixels, bundled with scikit-learn (no download)."""

    default_model = "mlp"
    default_lr = 0.2
    target_accuracy = 0.95
    fixed_shape = DataShape((1, 8, 8), 10)

    def load(self, config: RunConfig) -> Dataset:
        """Return the images, shape (1797, 1, 8, 8), from 0 to 1 before they are normalised."""
        # Reads the file of `load_digits` directly, as importing scikit-learn takes a second.
        package = find_spec("sklearn")
        if package is None or package.origin is None:
            raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
        path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
        numbers = np.loadtxt(path, delimiter=",")
        x = (numbers[:, :-1] / _BRIGHTEST).astype(np.float32).reshape(-1, 1, 8, 8)
        labels = numbers[:, -1].astype(np.int64)
        return Dataset(x, labels, num_classes=10, mean=_MEAN, std=_STD)


# -----------------------------------------------------------------------------
# Cache of arrays that take long to read: decoded images, parsed text.
#
# It lies in ``$RACEME_CACHE``, or ``raceme`` in ``$XDG_CACHE_HOME`` or ``~/.cache``, as the data's
# disk may be read-only. Files whose name, size or time has changed are read again. Removing the
# folder is always safe.
# -----------------------------------------------------------------------------


log = logging.getLogger("raceme")

Arrays = Mapping[str, NDArray[Any]]


def cached(
    name: str, files: Sequence[Path], settings: Sequence[object], build: Callable[[], Arrays]
) -> Arrays:
    """Return the arrays that `build` makes of some files, from the cache if possible.

    Parameters
    ----------
    name : str
        Name of the folder in the cache.
    files : Sequence[Path]
        The files that `build` reads.
    settings : Sequence[object]
        Further inputs that determine the result.
    build : Callable
        Reads the files and returns their arrays.

    Returns
    -------
    Mapping[str, NDArray]
        Read-only arrays, memory-mapped from the cache so that processes share them.
    """
    folder = cache_entry(name, files, settings)
    found = _load(folder)
    if found is not None:
        return found
    built = build()
    try:
        _store(folder, built)
    except OSError as error:
        log.warning("%s could not be cached in %s: %s", name, folder, error)
        return built
    return _load(folder) or built


def cache_entry(name: str, files: Sequence[Path], settings: Sequence[object]) -> Path:
    """Return the folder of some arrays in the cache; see :func:`cached`."""
    return cache_folder() / f"{name}-{_digest(files, settings)}"


def cache_folder() -> Path:
    """Return RACEME_CACHE, or else a folder under XDG_CACHE_HOME or ``~/.cache``."""
    own = os.environ.get("RACEME_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "raceme"


def _digest(files: Sequence[Path], settings: Sequence[object]) -> str:
    digest = hashlib.sha256(repr(list(settings)).encode())
    for file in files:
        with os_errors_as_user_errors(f"Cannot read {file}"):
            stat = os.stat(file)
        # Path.resolve is too slow for tens of thousands of files.
        path = os.path.abspath(file)
        digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _load(folder: Path) -> Arrays | None:
    """Return the arrays of a cache folder; None if missing or damaged."""
    if not folder.is_dir():
        return None
    try:
        # A view as a plain array that keeps the mapping.
        return {
            path.stem: np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
            for path in folder.glob("*.npy")
        }
    except (OSError, ValueError, EOFError):
        log.warning("the cache in %s is damaged: rebuilding it", folder)
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _store(folder: Path, arrays: Arrays) -> None:
    """Write a folder of arrays atomically."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name, values in arrays.items():
            np.save(partial / f"{name}.npy", values, allow_pickle=False)
        # Another process may have been first, with the same result.
        if not folder.exists():
            os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# -----------------------------------------------------------------------------
# Untrusted .npz files: sizes are checked before allocating memory.
# -----------------------------------------------------------------------------


_MAGIC = b"\x93NUMPY"
_HEADER = 65_536
"""Maximum length of an array's header in bytes; usual ones have about 100."""
_KINDS = "biufUS"
"""Allowed kinds of dtypes: numbers and text, no objects (pickle) and no records."""
_COPIES = 2
"""Copies in memory: as stored and in the needed type."""


def read_arrays(path: Path, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
    """Read arrays of an .npz file.

    Parameters
    ----------
    path : Path
        Path of the .npz file.
    names : Collection[str], optional
        Wanted arrays, by default all. Missing ones are left out.

    Raises
    ------
    ReadingError
        The file is no .npz file, or damaged.
    UserError
        An array exceeds the free memory.
    OSError
        The file cannot be opened.
    """
    check_regular(path)
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) == _MAGIC:
            raise ReadingError("it has a single array and is not an .npz archive")
    # numpy and zipfile raise various exceptions for foreign files.
    try:
        with ZipFile(path) as archive:
            members = {
                info.filename.removesuffix(".npy"): info
                for info in archive.infolist()
                if info.filename.endswith(".npy")
            }
            wanted = [name for name in members if names is None or name in names]
            return {name: _read(path, archive, members[name]) for name in wanted}
    except (BadZipFile, EOFError, ValueError, TypeError, NotImplementedError) as error:
        raise ReadingError(" ".join(str(error).split())[:200] or "it is damaged") from None
    except (
        SyntaxError,
        TokenError,
        RecursionError,
        MemoryError,
        OverflowError,
        LookupError,
    ) as error:
        raise ReadingError(f"an array's header is malformed ({type(error).__name__})") from None
    except (RuntimeError, ZlibError) as error:
        raise ReadingError(f"it is damaged ({' '.join(str(error).split())[:200]})") from None


def _read(path: Path, archive: ZipFile, info: Any) -> NDArray[Any]:
    name = info.filename.removesuffix(".npy")
    with archive.open(info) as member:
        start = io.BytesIO(member.read(_HEADER))
    shape, dtype = _header(start)
    if dtype.kind not in _KINDS:
        raise ReadingError(f"{name} holds neither numbers nor text but {dtype}")
    size = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or start.tell() + size != info.file_size:
        raise ReadingError(f"the size of {name} is not that of its header, shape {shape}")
    check_memory(_COPIES * size, f"{name} in {path}")
    with archive.open(info) as member:
        array: NDArray[Any] = npy.read_array(member, allow_pickle=False)
    return array


def _header(start: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = npy.read_magic(start)
    if version not in ((1, 0), (2, 0)):
        raise ReadingError(f"an array has format {version[0]}.{version[1]}; 1.0 and 2.0 are known")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(start)
    return shape, dtype


# -----------------------------------------------------------------------------
# Importing torchvision where its compiled operators do not match the installed torch.
#
# torch's CPU wheel together with the package index's torchvision is such a pair: torchvision's
# operators are built for CUDA, are not loaded, and ``import torchvision`` fails when it declares
# their shapes for the compiler. Datasets and transforms need no operators, so that declaration is
# left out.
# -----------------------------------------------------------------------------


_DECLARATIONS = "torchvision._meta_registrations"


def import_datasets() -> ModuleType:
    """Return the module ``torchvision.datasets``.

    Raises
    ------
    UserError
        torchvision is not installed.
    """
    try:
        return without_operators(lambda: import_module("torchvision.datasets"))
    except ModuleNotFoundError as error:
        raise explained(error) from None


def without_operators(load: Callable[[], Found]) -> Found:
    """Call a function that may import torchvision; on its known failure, work around and retry.

    Parameters
    ----------
    load : Callable
        Imports the module and returns the needed object.

    Raises
    ------
    Exception
        The import fails for another reason.
    """
    try:
        return load()
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    # The failed attempt leaves half of the package behind.
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    sys.modules[_DECLARATIONS] = ModuleType(_DECLARATIONS)
    return load()
