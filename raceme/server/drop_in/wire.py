"""Models as a user's ClientApp has them, and as a method can compute with them.

Most of a model are floating-point numbers that are averaged and compared. What is not, a mask of
booleans or of infinities, a table of large whole numbers, stays as it is: it travels along,
unchanged, and no method sees it.
"""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord

from raceme.compat import array, array_record
from raceme.config.errors import UserError
from raceme.protocol.messages import InvalidModelError, from_array, to_array

_BFLOAT16 = "bfloat16"
_FLOATS = ("float", _BFLOAT16)
_EXACT = 2**24
"""Whole numbers up to here are exact as float32."""
_MOST_NAMES = 3


class Wire:
    """Translates between the records of a user's app and those that methods work on.

    Parameters
    ----------
    initial : ArrayRecord
        The user's initial model.

    Attributes
    ----------
    initial : ArrayRecord
        The part of it that methods work on.
    carried : dict[str, Array]
        The other arrays.

    Raises
    ------
    UserError
        There is nothing in the model that could be trained.
    """

    def __init__(self, initial: ArrayRecord) -> None:
        self._names = list(initial)
        self.carried: dict[str, Array] = {}
        self._bfloat16: set[str] = set()
        for name, values in initial.items():
            if values.dtype == _BFLOAT16:
                self._bfloat16.add(name)
            elif not _is_computed(name, values):
                self.carried[name] = values
        self._is_plain = not (self.carried or self._bfloat16)
        self._last: tuple[ArrayRecord, ArrayRecord] | None = None
        if not any(
            values.dtype.startswith(_FLOATS) and name not in self.carried
            for name, values in initial.items()
        ):
            raise UserError(
                "initial_arrays holds no finite floating-point numbers, which updates of a model "
                "are: give its arrays, e.g. ArrayRecord(model.state_dict()). Trees cannot be "
                "averaged."
            )
        self.initial = self.received(initial)

    def sent(self, model: ArrayRecord) -> ArrayRecord:
        """Return a model as the user's app is to get it: all arrays, in the user's order."""
        if self._is_plain:
            return model
        # One model goes to many clients in a row.
        if self._last is None or self._last[0] is not model:
            whole = {
                name: self.carried[name] if name in self.carried else self._narrow(name, model)
                for name in self._names
            }
            self._last = model, array_record(whole)
        return self._last[1]

    def _narrow(self, name: str, model: ArrayRecord) -> Array:
        """Return an array of a model in the type that the user's has."""
        if name not in self._bfloat16:
            return model[name]
        values = np.ascontiguousarray(from_array(model[name]), np.float32)
        bits = values.view(np.uint32)
        # To the nearest, of two as near ones to the even one.
        half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        rounded = (bits + half) >> np.uint32(16)
        made = to_array(rounded.astype(np.uint16).view("V2").reshape(values.shape))
        return array(_BFLOAT16, made.shape, made.stype, made.data)

    def received(self, model: ArrayRecord) -> ArrayRecord:
        """Return the part of a user's model that methods work on.

        Raises
        ------
        InvalidModelError
            Its arrays have other names than those of the initial model.
        """
        if model.keys() != set(self._names):
            raise InvalidModelError(self._difference(model))
        if self._is_plain:
            return model
        return array_record(
            {
                name: _widened(values) if name in self._bfloat16 else values
                for name, values in model.items()
                if name not in self.carried
            }
        )

    def _difference(self, model: ArrayRecord) -> str:
        """Say how the names of a model's arrays differ from those of the initial one."""
        missing = [name for name in self._names if name not in model]
        strange = [name for name in model if name not in set(self._names)]
        parts = []
        if missing:
            parts.append(f"without {_some(missing)}")
        if strange:
            parts.append(f"with {_some(strange)}, which the initial model does not have")
        return f"it returns a model {' and '.join(parts)}"


def _is_computed(name: str, values: Array) -> bool:
    """Return whether an array takes part in what methods compute.

    Raises
    ------
    UserError
        It is not readable.
    """
    try:
        numbers = from_array(values)
    except InvalidModelError as error:
        raise UserError(f"initial_arrays: '{name}' cannot be used: {error}.") from None
    if numbers.dtype.kind == "f":
        return bool(np.isfinite(numbers).all())
    # A count, such as that of batch normalisation's batches.
    return numbers.dtype.kind in "iu" and bool((np.abs(numbers.astype(np.float64)) < _EXACT).all())


def _widened(values: Array) -> Array:
    """Return an array of bfloat16 as float32."""
    bits = from_array(values).view(np.uint16).astype(np.uint32) << np.uint32(16)
    return to_array(bits.view(np.float32))


def _some(names: list[str]) -> str:
    """List the first names."""
    shown = ", ".join(f"'{name}'" for name in names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
