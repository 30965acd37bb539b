"""The client half: a change that is to be masked is clipped on the device, before that."""

from __future__ import annotations

import numpy as np
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable

from raceme.core import messages as names
from raceme.core.gaussian import clipped
from raceme.core.messages import ModelSpec
from raceme.features.central_privacy import CLIP, Options


def work(
    message: Message, context: Context, call_next: ClientAppCallable, options: Options
) -> Message:
    """Clip the change of a trained model to the length that the message names, if any."""
    reply = call_next(message, context)
    asked = message.content.config_records.get(names.CONFIG, ConfigRecord())
    model = reply.content.array_records.get(names.ARRAYS) if not reply.has_error() else None
    if model is None or CLIP not in asked:
        return reply
    length = asked[CLIP]
    if not isinstance(length, float) or not 0 < length < float("inf"):
        raise ValueError(f"{CLIP} must be a number above 0, got {length!r}.")
    spec = ModelSpec.of(model)
    base = spec.unpack(message.content.array_records[names.ARRAYS])
    vector = base + clipped(spec.unpack(model) - base, length)
    reply.content[names.ARRAYS] = spec.pack(np.asarray(vector, np.float32))
    reply.content.metric_records[names.METRICS][CLIP] = length
    return reply
