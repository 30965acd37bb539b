"""The client half: encoding of trained models."""

from __future__ import annotations

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from raceme.core.messages import ARRAYS, from_array
from raceme.features.short_upload import Options
from raceme.features.short_upload.codes import SCALES, encoded
from raceme.flower.messages import array_record

RESIDUAL = "upload-residual"
"""Record of a client's state: rounding error of its last upload."""


def work(
    message: Message, context: Context, call_next: ClientAppCallable, options: Options
) -> Message:
    """Send a trained model in 8-bit codes, with error feedback.

    A model with non-finite numbers is sent unchanged, and refused by the server.
    """
    reply = call_next(message, context)
    if reply.has_error():
        return reply
    model = reply.content.array_records.get(ARRAYS)
    if model is None or not all(np.isfinite(from_array(array)).all() for array in model.values()):
        return reply
    residual = context.state.array_records.get(RESIDUAL) or array_record({})
    codes, scales = encoded(model, residual)
    context.state[RESIDUAL] = residual
    reply.content[ARRAYS], reply.content[SCALES] = codes, scales
    return reply
