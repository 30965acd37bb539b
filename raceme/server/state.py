"""Strategy state to plain trees and back: derived from the dataclasses, not written twice.

A tree consists of dicts with text keys, lists, numbers, text, booleans, None and numpy arrays.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np


def to_tree(value: Any) -> Any:
    """Turn a dataclass, or anything made of dataclasses and containers, into a tree. Copies arrays.

    Raises
    ------
    TypeError
        For a kind of object that a tree cannot hold.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_tree(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_tree(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_tree(inner) for inner in value]
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"cannot keep a {type(value).__name__} in a state")


_TYPES: dict[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (float, int),
    str: (str,),
    dict: (dict,),
    MutableMapping: (dict,),
    list: (list,),
    tuple: (list,),
    np.ndarray: (np.ndarray,),
}
"""What stands in a tree for a type."""


def from_tree(kind: Any, tree: Any) -> Any:
    """Build an object of type `kind` from the tree that :func:`to_tree` made of one.

    Raises
    ------
    ValueError
        The tree has other fields than the dataclass, or something in it is of another type.
    """
    wanted = _TYPES.get(get_origin(kind) or kind)
    if wanted and type(tree) not in wanted:
        raise ValueError(f"{str(tree)[:40]!r} is no {getattr(kind, '__name__', kind)}")
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(tree, dict):
            raise ValueError(f"not a {kind.__name__}: {str(tree)[:40]!r}")
        hints = get_type_hints(kind)
        names = [item.name for item in fields(kind)]
        if set(names) != set(tree):
            raise ValueError(f"not a {kind.__name__}: fields {sorted(tree)}, not {sorted(names)}")
        return kind(**{name: from_tree(hints[name], tree[name]) for name in names})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if tree is None:
            return None
        return from_tree(next(arg for arg in arguments if arg is not type(None)), tree)
    if origin in (dict, MutableMapping):
        return {arguments[0](key): from_tree(arguments[1], inner) for key, inner in tree.items()}
    if origin is list:
        return [from_tree(arguments[0], inner) for inner in tree]
    if origin is tuple:
        return tuple(from_tree(arguments[0], inner) for inner in tree)
    if isinstance(tree, np.ndarray):
        _check_dtype(tree, arguments)
        return tree.copy()
    return kind(tree) if kind in (int, float, str) else tree


def _check_dtype(array: np.ndarray[Any, Any], arguments: tuple[Any, ...]) -> None:
    """Raise ValueError if an array's numbers are not those of its annotation, NDArray[kind]."""
    wanted = get_args(arguments[1])[0] if len(arguments) == 2 else None
    if isinstance(wanted, type) and not issubclass(array.dtype.type, wanted):
        raise ValueError(f"an array of {array.dtype} where {wanted.__name__} belongs")
