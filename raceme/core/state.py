"""States in checkpoints: conversion of dataclasses to plain trees and back.

A tree consists of dicts with text keys, lists, numbers, text, booleans, None and numpy arrays.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, MutableMapping
from dataclasses import Field, dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from raceme.core.errors import UserError

TRANSIENT = MappingProxyType({"transient": True})
"""Metadata of a dataclass field that is not part of a state."""


@dataclass
class NoState:
    """State of a method, feature or scheduler without any."""


def to_tree(value: Any) -> Any:
    """Convert dataclasses and containers to a tree; arrays are copied.

    Raises
    ------
    TypeError
        The type is not supported.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_tree(getattr(value, item.name)) for item in _kept(value)}
    if isinstance(value, Mapping):
        return {str(key): to_tree(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_tree(inner) for inner in value]
    if isinstance(value, set | frozenset):
        # Sorted, so that the same state is always written alike.
        return sorted(to_tree(inner) for inner in value)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"cannot keep a {type(value).__name__} in a state")


def stored(state: Any, kind: Any, what: str, *, verified: bool) -> Any:
    """Convert a state to a tree.

    Parameters
    ----------
    state : Any
        A dataclass.
    kind : Any
        Its annotated type.
    what : str
        Owner of the state, for the message.
    verified : bool
        Whether to check now that the state can be restored, so that a resumption cannot fail.

    Raises
    ------
    UserError
        It has values of other types than annotated.
    """
    try:
        tree = to_tree(state)
        if verified:
            from_tree(kind, tree)
    except (TypeError, ValueError) as error:
        raise UserError(f"the state of {what} is invalid: {error}") from None
    return tree


def _kept(value: Any) -> list[Field[Any]]:
    """Return the fields of a dataclass or its type that are part of a state."""
    return [item for item in fields(value) if not item.metadata.get("transient")]


_TYPES: dict[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (float, int),
    str: (str,),
    dict: (dict,),
    MutableMapping: (dict,),
    list: (list,),
    tuple: (list,),
    set: (list,),
    frozenset: (list,),
    np.ndarray: (np.ndarray,),
}
"""Types in a tree by annotated type."""


def from_tree(kind: Any, tree: Any) -> Any:
    """Build an object of type `kind` from a tree of :func:`to_tree`.

    Raises
    ------
    ValueError
        The tree has other fields than the dataclass, or other types.
    """
    kind = _without_aliases(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    wanted = _TYPES.get(origin or kind)
    if wanted and type(tree) not in wanted:
        raise ValueError(f"{repr(tree)[:40]} is no {getattr(kind, '__name__', kind)}")
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(tree, dict):
            raise ValueError(f"not a {kind.__name__}: {str(tree)[:40]!r}")
        hints = get_type_hints(kind)
        names = [item.name for item in _kept(kind)]
        if set(names) != set(tree):
            raise ValueError(f"not a {kind.__name__}: fields {sorted(tree)}, not {sorted(names)}")
        return kind(**{name: _field(kind, name, hints[name], tree[name]) for name in names})
    if origin in (Union, types.UnionType):
        if tree is None:
            return None
        return from_tree(next(arg for arg in arguments if arg is not type(None)), tree)
    if origin in (dict, MutableMapping):
        return {arguments[0](key): from_tree(arguments[1], inner) for key, inner in tree.items()}
    if origin is list:
        return [from_tree(arguments[0], inner) for inner in tree]
    if origin in (set, frozenset):
        return origin(from_tree(arguments[0], inner) for inner in tree)
    if origin is tuple:
        kinds = arguments if arguments[-1] is not Ellipsis else arguments[:1] * len(tree)
        return tuple(from_tree(one, inner) for one, inner in zip(kinds, tree, strict=True))
    if isinstance(tree, np.ndarray):
        _check_dtype(tree, arguments)
        return tree.copy()
    return kind(tree) if kind in (int, float, str) else tree


def _field(owner: type, name: str, kind: Any, tree: Any) -> Any:
    """Build the value of a field; errors name it."""
    try:
        return from_tree(kind, tree)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{owner.__name__}.{name}: {error}") from None


_PLAIN = (bool, int, float, str, np.ndarray, Any)
_KEYS = (str, int, float)


def check_storable(kind: Any, where: str, within: tuple[Any, ...] = ()) -> None:
    """Check that :func:`from_tree` can build the objects of a type, before a run has any.

    Parameters
    ----------
    kind : Any
        Annotated type.
    where : str
        Its class or field, for the message.
    within : tuple
        Dataclasses that contain it, which may refer to themselves.

    Raises
    ------
    UserError
        A part of it would be lost or changed.
    """
    kind = _without_aliases(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    inner = [one for one in arguments if one not in (type(None), Ellipsis)]
    if kind in within:
        return
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        for item in _kept(kind):
            check_storable(hints[item.name], f"{where}.{item.name}", (*within, kind))
    elif (
        (origin in (Union, types.UnionType) and len(inner) == 1)
        or origin in (list, set, frozenset, tuple)
        or (origin in (dict, MutableMapping) and inner[0] in _KEYS)
    ):
        for one in inner:
            check_storable(one, where, within)
    elif origin is not np.ndarray and kind not in _PLAIN:
        name = kind.__name__ if isinstance(kind, type) else kind
        raise UserError(
            f"{where} is {name}, which a checkpoint cannot restore: use numbers, text, arrays and "
            "dataclasses, in list[...], set[...], tuple[...], dict[str, ...] or dict[int, ...]."
        )


def _without_aliases(kind: Any) -> Any:
    """Resolve aliases made by ``type Name[...] = ...``, such as numpy's NDArray."""
    while hasattr(alias := get_origin(kind) or kind, "__value__"):
        arguments = get_args(kind)
        kind = alias.__value__[arguments] if arguments else alias.__value__
    return kind


def _check_dtype(array: np.ndarray[Any, Any], arguments: tuple[Any, ...]) -> None:
    """Raise ValueError if an array's dtype contradicts its annotation, where that states one."""
    wanted = next((get_args(one)[0] for one in arguments if get_origin(one) is np.dtype), None)
    if isinstance(wanted, type) and not issubclass(array.dtype.type, wanted):
        raise ValueError(f"an array of {array.dtype} where {wanted.__name__} belongs")
