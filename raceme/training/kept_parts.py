"""What a client keeps of each of its tasks: its parts of decomposed weights, in its state."""

from __future__ import annotations

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor

from raceme.compat import array_record
from raceme.protocol.messages import from_array, to_array
from raceme.training.decomposition import Masks, TaskPart
from raceme.training.work import ClientWork

PART = "part-"
"""Records of a client's state: what it keeps of a task, by the task's number."""
_LOGITS = "logits"
"""Name of a mask in such a record if M is the sigmoid of it."""


def complete(work: ClientWork, step: int) -> None:
    """Make of the shared part in a client's network its weights for a task, if it has a part."""
    if key(step) in work.state:
        network, record = work.client.network, work.state.array_records[key(step)]
        masks = Masks(network, sigmoid=_LOGITS in record)
        part = read(record, network.accelerator)
        network.weights.copy_(part.weights(network.weights, masks))


def key(step: int) -> str:
    """Name the record of a task."""
    return f"{PART}{step}"


def read(record: ArrayRecord, accelerator: str) -> TaskPart:
    """Read a part as the client keeps it into the memory of an accelerator."""
    arrays = {
        name: torch.from_numpy(np.array(from_array(array))).to(accelerator)
        for name, array in record.items()
    }
    mask = arrays[_LOGITS] if _LOGITS in arrays else arrays["mask"]
    rest = (arrays[name] for name in ("adaptive", "borrowed", "shares", "held"))
    return TaskPart(mask, *rest)


def written(part: TaskPart, masks: Masks) -> ArrayRecord:
    """Return a part as the client keeps it."""
    arrays: dict[str, Tensor] = {
        _LOGITS if masks.sigmoid else "mask": part.mask,
        "adaptive": part.adaptive,
        "borrowed": part.borrowed,
        "shares": part.shares,
        "held": part.held,
    }
    return array_record({name: to_array(values.cpu().numpy()) for name, values in arrays.items()})
