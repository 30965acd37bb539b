"""Models in 8-bit codes: each row of an array has 256 levels between its extremes."""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord

from raceme.core.errors import quoted
from raceme.core.messages import InvalidModelError, Role, from_array, to_array
from raceme.flower.messages import array_record

SCALES = "scales"
"""Record with the range of each row of a model in 8-bit codes."""
_LEVELS = 255


def encoded(model: ArrayRecord, residual: ArrayRecord) -> tuple[ArrayRecord, ArrayRecord]:
    """Return a model in 8-bit codes, and the range of each row: lowest value and step.

    Parameters
    ----------
    model : ArrayRecord
        A model of finite weights. Arrays of whole numbers and running statistics are not encoded.
    residual : ArrayRecord
        Rounding error of the client's last upload, which is added first (error feedback) and
        replaced by the new one; empty at first.
    """
    codes, scales = dict(model), dict[str, Array]()
    for name, own in model.items():
        values = from_array(own)
        # Running statistics are few, and rounding errors could make a variance negative.
        if Role.of(name, values.dtype.str) is not Role.TRAINABLE:
            continue
        total = values.astype(np.float32)
        if name in residual:
            total += from_array(residual[name]).astype(np.float32)
        rows = total.reshape(len(total) if total.ndim > 1 else 1, -1)
        low, high = rows.min(1, keepdims=True), rows.max(1, keepdims=True)
        step = np.maximum((high - low) / _LEVELS, np.finfo(np.float32).tiny)
        code = np.rint((rows - low) / step).astype(np.uint8)
        codes[name] = to_array(code.reshape(values.shape))
        scales[name] = to_array(np.hstack([low, step]))
        residual[name] = to_array((rows - (low + step * code)).reshape(values.shape))
    return array_record(codes), array_record(scales)


def decoded(codes: ArrayRecord, scales: ArrayRecord) -> ArrayRecord:
    """Return the model of an :func:`encoded` record.

    Raises
    ------
    InvalidModelError
        The codes do not match the ranges.
    """
    model = dict(codes)
    for name, ranges in scales.items():
        code = from_array(codes[name]) if name in codes else np.empty(0)
        scale, count = from_array(ranges), len(code) if code.ndim > 1 else 1
        fits = code.size and code.dtype == np.uint8 and scale.dtype == np.float32
        if not fits or scale.shape != (count, 2):
            raise InvalidModelError(f"codes and scales of {quoted(name)} do not fit together")
        low, step = scale.astype(np.float32)[:, :1], scale.astype(np.float32)[:, 1:]
        with np.errstate(over="ignore", invalid="ignore"):
            values = low + step * code.reshape(count, -1).astype(np.float32)
        model[name] = to_array(values.reshape(code.shape))
    return array_record(model)
