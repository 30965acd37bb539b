"""Labels of .npz files: classes, or a quantity, which a file is of that names a unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raceme.config.errors import UserError
from raceme.datasets.source import Labels, Target

MOST_CLASSES = 100_000
"""A model has an output for each: more than that are a mistake, as a rule of the labels' type."""
LABEL_ARRAYS = ("num_classes", "unit", "y_mean", "y_std")
"""Arrays that say what the labels of a file are, all of them optional."""
_LONGEST_UNIT = 24
"""Characters: a unit stands in tables and at axes."""
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Quantity:
    """What a file says of the quantity that its labels are.

    Attributes
    ----------
    unit : str
        Its unit; may be empty.
    mean, std : float or None
        What it is standardised by; None where the file does not say.
    """

    unit: str
    mean: float | None = None
    std: float | None = None


def target_of(quantity: Quantity | None) -> Target | None:
    """Return what a model predicts if that is a quantity: as it is where no scale is said."""
    if quantity is None:
        return None
    if quantity.mean is None or quantity.std is None:
        return Target(quantity.unit)
    return Target(quantity.unit, quantity.mean, quantity.std)


def quantity_of(path: Path, arrays: Mapping[str, NDArray[np.generic]]) -> Quantity | None:
    """Return the quantity that the labels of a file are; None if they are classes.

    Raises
    ------
    UserError
        What the file says of it is not what it should be.
    """
    unit = arrays.get("unit")
    stated = [name for name in ("y_mean", "y_std") if name in arrays]
    if unit is None:
        if stated:
            raise UserError(
                f"{path} has {' and '.join(stated)}, as a quantity has, but not its unit: add "
                "unit, a text, which may be empty."
            )
        return None
    text = str(unit.item()) if unit.size == 1 and unit.dtype.kind == "U" else None
    if text is None or len(text) > _LONGEST_UNIT or not (text.isprintable() or not text):
        raise UserError(
            f"{path}: unit must be one text of at most {_LONGEST_UNIT} characters, such as '°C'; "
            f"got {str(unit.tolist())[:60]!r}."
        )
    if len(stated) == 1:
        raise UserError(f"{path} has {stated[0]} alone: y_mean and y_std go together.")
    if "num_classes" in arrays:
        raise UserError(f"{path} has num_classes and unit: labels are classes, or a quantity.")
    if not stated:
        return Quantity(text.strip())
    mean, std = (_number(path, name, arrays[name]) for name in ("y_mean", "y_std"))
    if not std > 0:
        raise UserError(f"{path}: y_std must be above 0, got {std:g}.")
    return Quantity(text.strip(), mean, std)


def _number(path: Path, name: str, values: NDArray[np.generic]) -> float:
    number = float(values.item()) if values.size == 1 and values.dtype.kind in "fiu" else np.nan
    if not abs(number) <= _LARGEST:
        raise UserError(
            f"{path}: {name} must be one finite number; got {str(values.tolist())[:60]}."
        )
    return number


def common_quantity(quantities: Mapping[Path, Quantity | None]) -> Quantity | None:
    """Return the quantity of several files, of which one model is to predict the labels.

    Raises
    ------
    UserError
        They are not of the same.
    """
    (first, expected), *others = quantities.items()
    for path, quantity in others:
        if quantity != expected:
            raise UserError(
                f"{path} and {first} must say the same of their labels, which one model predicts: "
                f"{described(quantity)} and {described(expected)}."
            )
    return expected


def described(stated: Quantity | Target | None) -> str:
    """Return what labels are, for people, in the words of a file."""
    if stated is None:
        return "classes"
    unit = f"unit '{stated.unit}'"
    scale = "" if stated.std is None else f", y_mean {stated.mean:g}, y_std {stated.std:g}"
    return unit + scale


def checked_labels(
    path: Path, name: str, values: NDArray[np.generic], samples: int
) -> NDArray[np.int64]:
    """Check classes and make them int64."""
    if values.dtype.kind not in "iu" or values.shape != (samples,):
        quantity = " A quantity needs its unit, a text." if values.dtype.kind == "f" else ""
        raise UserError(
            f"{path}: {name} must hold whole numbers, shape ({samples},), one for each sample; "
            f"got {values.dtype} of shape {values.shape}.{quantity}"
        )
    lowest, highest = int(values.min()), int(values.max())
    if lowest < 0 or highest >= MOST_CLASSES:
        raise UserError(
            f"{path}: {name} must hold labels from 0 on, below {MOST_CLASSES:,}; got "
            f"{lowest if lowest < 0 else highest}."
        )
    return values.astype(np.int64)


def checked_quantities(
    path: Path, name: str, values: NDArray[np.generic], samples: int
) -> NDArray[np.float32]:
    """Check the values of a quantity and make them float32."""
    if values.dtype.kind not in "fiu" or values.shape != (samples,):
        raise UserError(
            f"{path}: {name} must hold numbers, shape ({samples},), one for each sample; "
            f"got {values.dtype} of shape {values.shape}."
        )
    with np.errstate(over="ignore"):
        quantities = values.astype(np.float32)
    if not np.isfinite(quantities).all():
        raise UserError(f"{path}: {name} must be finite; it holds NaN, infinity or huge numbers.")
    return quantities


def checked_targets(
    path: Path, name: str, values: NDArray[np.generic], samples: int, quantity: Quantity | None
) -> Labels:
    """Check labels: classes become int64; a quantity becomes float32, in its unit as it is."""
    check = checked_labels if quantity is None else checked_quantities
    return check(path, name, values, samples)


def standardised_labels(path: Path, values: Labels, target: Target | None) -> Labels:
    """Return labels as models are trained with: classes as they are, quantities standardised."""
    if target is None:
        return values
    with np.errstate(over="ignore"):
        labels = ((values.astype(np.float64) - target.mean) / target.std).astype(np.float32)
    if not np.isfinite(labels).all():
        raise UserError(
            f"{path}: its labels are too many times y_std, {target.std:g}, from y_mean."
        )
    return labels


def num_classes_of(path: Path, values: NDArray[np.generic] | None, found: int) -> int:
    """Return the stated number of classes, or else the one found in the labels."""
    if values is None:
        return found
    fits = values.dtype.kind in "iu" and values.size == 1
    if not fits or not found <= int(values.item()) <= MOST_CLASSES:
        raise UserError(
            f"{path}: num_classes must be one whole number, at least {found} for its labels and at "
            f"most {MOST_CLASSES:,}; got {str(values.tolist())[:60]}."
        )
    return int(values.item())
