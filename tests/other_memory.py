"""A stand-in for a GPU: tensors that claim to be in its memory, and reject those of the CPU.

It checks without a GPU that Raceme's training moves data correctly: operations on tensors of both
memories are errors, and a GPU's tensors cannot be read without a copy. The CPU computes the
numbers. A GPU's arithmetic, speed and drivers are not covered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

PLACE = torch.device("meta")


class Elsewhere(Tensor):
    """A tensor that claims to be in a GPU's memory; the numbers are in `inner`."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=PLACE,
            requires_grad=inner.requires_grad,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function == Tensor.data.__set__:  # type: ignore[attr-defined]
                args[0].inner = args[1].inner
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return computed(function, args, kwargs or {})


def computed(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute an operation on the CPU, if all of its tensors are in the same memory."""
    tensors: list[Tensor] = []
    tree_map(lambda a: tensors.append(a) if isinstance(a, Tensor) else None, (args, kwargs))
    there = any(isinstance(tensor, Elsewhere) for tensor in tensors)
    wanted = kwargs.get("device")
    if function is torch.ops.aten._to_copy.default and wanted is not None:
        (source,) = tensors
        inner = source.inner if isinstance(source, Elsewhere) else source
        copied = function(inner, *args[1:], **{**kwargs, "device": torch.device("cpu")})
        copied = copied.clone() if copied is inner else copied
        return Elsewhere(copied) if torch.device(wanted).type == PLACE.type else copied
    if wanted is not None and torch.device(wanted).type == PLACE.type:
        there = True
        kwargs = {**kwargs, "device": torch.device("cpu")}
    copies = function in (torch.ops.aten.copy_.default, torch.ops.aten.index_put_.default)
    if there and not copies:
        for tensor in tensors:
            # GPUs accept scalars of the CPU.
            if not isinstance(tensor, Elsewhere) and tensor.dim():
                raise RuntimeError(f"{function}: tensors are in the CPU's memory and a GPU's")
    inside = tree_map(lambda a: a.inner if isinstance(a, Elsewhere) else a, (args, kwargs))
    results = function(*inside[0], **inside[1])
    if not there or function is torch.ops.aten._local_scalar_dense.default:
        return results
    if copies and not isinstance(args[0], Elsewhere):
        return args[0]
    if function._schema.name.endswith("_") and isinstance(args[0], Elsewhere):
        return args[0]
    return tree_map(lambda r: Elsewhere(r) if isinstance(r, Tensor) else r, results)


class _Gpu(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return computed(function, args, kwargs or {})


@contextmanager
def gpu() -> Iterator[None]:
    """Use ``meta`` as the GPU, with its own tensor class."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        # Wrapped tensors do not support inference mode.
        with patch.object(torch, "inference_mode", torch.no_grad), _Gpu():
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
