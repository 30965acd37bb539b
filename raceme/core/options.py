"""Typed options: default, meaning, unit and range, declared beside the code that reads them.

A reader of options declares them as a frozen dataclass beside itself::

    @dataclass(frozen=True)
    class SyntheticOptions:
        synthetic_alpha: float = option(1.0, "how far the clients' models differ", low=0)

The field ``synthetic_alpha`` is the key ``synthetic-alpha`` on the command line, in TOML files and
in Flower's run config. :mod:`raceme.core.config` reads the keys of a run into these dataclasses;
there is no other list of keys.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, field, fields, is_dataclass, make_dataclass
from functools import cache
from inspect import Parameter, Signature, signature
from typing import Any, NamedTuple, TypeVar

from raceme.core.errors import UserError, shortened, unknown_name

log = logging.getLogger("raceme")

Value = str | int | float | bool
"""Types of values, in TOML and in Flower's run config."""

AUTO = "auto"
"""Text for an option whose value is filled in later; in Python it is None."""

SECONDS = "s"
"""The unit of times."""

_Function = TypeVar("_Function", bound=Callable[..., Any])

_Options = TypeVar("_Options")

_LARGEST = 2**63 - 1
"""Whole numbers in TOML, in SQLite and in Flower's messages have 64 bits and a sign."""
_TYPES = {"bool": "true|false", "int": "INTEGER", "float": "NUMBER", "str": "TEXT"}
_BOUNDS = {
    "low": ("at least", operator.ge),
    "above": ("greater than", operator.gt),
    "high": ("at most", operator.le),
    "below": ("below", operator.lt),
}
"""Bounds of numbers: words for messages, and the comparison."""
_UNITS = {SECONDS: "SECONDS", "px": "PIXELS"}
"""Units in words, as they stand in the help of a command."""


class Key(NamedTuple):
    """Declaration of a key.

    Attributes
    ----------
    default : Value
        As written in a file or on the command line.
    help : str
        One line on its meaning, as ``raceme list --keys`` shows it.
    type, unit : str
        As shown in help texts; the unit may be empty.
    readers : Mapping[str, tuple[str, ...]]
        Names of the objects that read it, by kind; empty for a key of every run.
    item : Field
        Dataclass field that declares the key, its type and its range.
    """

    default: Value
    help: str
    type: str
    unit: str
    readers: Mapping[str, tuple[str, ...]]
    item: Field[Any]


def option(
    default: Any,
    help: str,
    *,
    unit: str = "",
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    among: tuple[str, ...] = (),
    names: Mapping[str, Any] | None = None,
    unless: tuple[str, str] | None = None,
    several: bool = False,
    path: bool = False,
    formerly: str = "",
    affects_results: bool = True,
) -> Any:
    """Declare an option: its default, its one-line meaning, its unit and its range.

    Parameters
    ----------
    default : Any
        The default; None means "auto".
    help : str
        Meaning, for ``raceme list --keys``, the command line and the report.
    unit : str
        Unit of a number, if any: ``"s"``, ``"px"``.
    low, above, high, below : float, optional
        Smallest allowed value; largest value that is too small; largest allowed value; smallest
        value that is too large.
    among : tuple[str, ...]
        The allowed values of a text.
    names : Registry, optional
        General options only: the value is a name in this table, whose object reads options of its
        own.
    several : bool
        With `names`: the value has any number of them, separated by commas.
    unless : tuple[str, str], optional
        General options only: another option whose value is a name, and an attribute of the named
        object. If the attribute is true, this option is not read.
    path : bool
        The value is a path, which a run makes absolute.
    formerly : str
        The attribute's name in the previous release, which is still accepted, with a warning.
    affects_results : bool
        General options only: whether a resumed or compared run needs the same value.
    """
    rules = {"low": low, "above": above, "high": high, "below": below, "among": among}
    about = {"help": help, "unit": unit, "names": names, "unless": unless, "path": path}
    further = {"several": several, "formerly": formerly, "affects_results": affects_results}
    return field(default=default, metadata=rules | about | further)


def names_in(item: Field[Any], value: Any) -> list[str]:
    """Return the names in the value of an option that takes names."""
    if not item.metadata.get("several"):
        return [str(value)]
    return list(filter(None, (name.strip() for name in str(value).split(","))))


def with_defaults(options_type: type[_Options], **defaults: Any) -> type[_Options]:
    """Return the dataclass of options with other defaults, for a variant of their reader."""
    others = [
        (item.name, item.type, field(default=defaults[item.name], metadata=item.metadata))
        for item in fields(options_type)  # type: ignore[arg-type]
        if item.name in defaults
    ]
    made: type[_Options] = make_dataclass(
        options_type.__name__, others, bases=(options_type,), frozen=True
    )
    made.__module__ = options_type.__module__
    return made


def reads(options_type: type[Any]) -> Callable[[_Function], _Function]:
    """Declare the options of a function, like the attribute ``options_type`` of a class."""

    def mark(function: _Function) -> _Function:
        function.__dict__["options_type"] = options_type
        return function

    return mark


def signature_of(function: Callable[..., Any], *options_types: type[Any]) -> Signature:
    """Return the signature of a method, with options instead of ``**arguments``."""
    _, *own = signature(function).parameters.values()
    if not own or own[-1].kind is not Parameter.VAR_KEYWORD:
        return Signature(own)
    options = [
        Parameter(item.name, Parameter.KEYWORD_ONLY, default=item.default, annotation=item.type)
        for options_type in options_types
        for item in fields(options_type)
    ]
    return Signature([*own[:-1], *options])


_FIRST = (
    "parameters : dataclass, default None",
    "    hyper-parameters given together; single ones below take precedence.",
    "seed : int, default 0",
    "    seed of the method's random choices.",
)


def documented(summary: str, source: str, *options_types: type[Any]) -> str:
    """Return a docstring with a section of the parameters: type, default, range and meaning.

    Parameters
    ----------
    summary : str
        The docstring without them, cleaned of its indentation.
    source : str
        Source of the method, e.g. a paper, for the section of notes.
    *options_types : type
        Dataclasses of options.
    """
    lines = [summary, "", "Parameters", "----------", *_FIRST]
    for item in (item for options_type in options_types for item in fields(options_type)):
        rules = item.metadata
        limits = [
            f"{words} {rules[rule]:g}"
            for rule, (words, _) in _BOUNDS.items()
            if rules.get(rule) is not None
        ]
        among = [f"one of {', '.join(rules['among'])}"] if rules.get("among") else []
        range_ = f" ({' and '.join(limits + among)})" if limits or among else ""
        lines.append(f"{item.name} : {item.type}, default {item.default!r}")
        lines.append(f"    {rules.get('help', '')}{range_}.")
    return "\n".join([*lines, *(["", "Notes", "-----", source] if source else [])])


def key_of(attribute: str) -> str:
    """Return the key of an option: ``synthetic-alpha`` for ``synthetic_alpha``."""
    return attribute.replace("_", "-")


def as_typed(value: Value) -> str:
    """Return a value as typed on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def declared(options_type: type[Any], prefix: str = "") -> dict[str, Field[Any]]:
    """Return the options of a dataclass, by key.

    Raises
    ------
    UserError
        It is no dataclass, or an option lacks a default or has one of an unsupported type.
    """
    if not (isinstance(options_type, type) and is_dataclass(options_type)):
        raise UserError(f"Options must be a dataclass, got {_shown(options_type)}.")
    options = {prefix + key_of(item.name): item for item in fields(options_type)}
    where = f"{options_type.__module__}.{options_type.__qualname__}"
    missing = [name for name, item in options.items() if item.default is MISSING]
    if missing:
        raise UserError(f"Options need defaults: {where} has none for {', '.join(missing)}.")
    for name, item in options.items():
        if not isinstance(item.default, str | int | float | None):
            raise UserError(
                f"Options are texts, numbers, true or false: {where} has {_shown(item.default)} as "
                f"the default of {name}."
            )
    return options


def present_names(given: Mapping[str, Any], options: Mapping[str, Field[Any]]) -> dict[str, Any]:
    """Return given values under the current names of renamed options.

    Parameters
    ----------
    given : Mapping[str, Any]
        Values by key, or by attribute.
    options : Mapping[str, Field]
        The options, named in the same way.

    Raises
    ------
    UserError
        An option is given under both of its names.
    """
    renamed = {}
    for name, item in options.items():
        if former := item.metadata.get("formerly"):
            prefix, dot, last = name.rpartition(".")
            renamed[prefix + dot + (former if last == item.name else key_of(former))] = name
    present: dict[str, Any] = {}
    for name, value in given.items():
        if name in renamed:
            if renamed[name] in given:
                raise UserError(f"{name} is called {renamed[name]} now: give one of them.")
            _warn_of_former_name(name, renamed[name])
        present[renamed.get(name, name)] = value
    return present


@cache
def _warn_of_former_name(former: str, present: str) -> None:
    """Warn once that the next release drops a name."""
    log.warning("%s is called %s now; the next release drops the former name.", former, present)


def is_path(item: Field[Any]) -> bool:
    """Return whether the value of an option is a path."""
    return bool(item.metadata.get("path"))


def written(value: Value | None) -> Value:
    """Return the value of an option as written in a file."""
    return AUTO if value is None else value


def convert(name: str, value: Any, item: Field[Any]) -> Any:
    """Convert a written value to the type of an option, and check its range.

    Parameters
    ----------
    name : str
        The key, for error messages.
    value : Any
        E.g. ``"12"``, ``12`` or ``"auto"``.
    item : Field
        The declaration of the option.

    Raises
    ------
    UserError
        The value is of another type or out of the range.
    """
    wanted, optional = _annotation(item)
    if optional and isinstance(value, str | None) and value in (AUTO, None):
        return None
    converted = _converted(value, wanted)
    if converted is None:
        described = {"bool": "true or false", "int": "a whole number", "float": "a number"}
        raise UserError(f"{name} must be {described.get(wanted, 'text')}, got {_shown(value)}.")
    if isinstance(converted, str) and not _is_writable(converted):
        raise UserError(f"{name} must be text that a file can hold, got {_shown(converted)}.")
    check_range(name, converted, item)
    return converted


def check_range(name: str, value: Any, item: Field[Any]) -> None:
    """Check that a value is in the range that its option declares.

    Raises
    ------
    UserError
        It is not.
    """
    rules = item.metadata
    if rules.get("among") and value not in rules["among"]:
        raise unknown_name(f"value of {name}", str(value), rules["among"])
    if value is None or isinstance(value, bool | str):
        return
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise UserError(f"{name} must be a number of 64 bits, {_LARGEST} at most.")
    for rule, (words, holds) in _BOUNDS.items():
        bound = rules.get(rule)
        if bound is not None and not holds(value, bound):
            raise UserError(f"{name} must be {words} {bound:g}, got {value:g}.")


def shown_type(item: Field[Any], with_unit: bool = False) -> str:
    """Return the type of an option in words: ``INTEGER|auto``, ``equal|power-law``, ``SECONDS``.

    Parameters
    ----------
    item : Field
        The declaration of the option.
    with_unit : bool
        Whether to name the unit, if any, instead of the type.
    """
    wanted, optional = _annotation(item)
    shown = "|".join(item.metadata.get("among", ())) or _TYPES.get(wanted, "TEXT")
    if item.metadata.get("names") is not None:
        shown = "NAME"
    if item.metadata.get("path"):
        shown = "PATH"
    unit = item.metadata.get("unit", "")
    if with_unit and unit:
        shown = _UNITS.get(unit, unit.upper())
    return f"{shown}|{AUTO}" if optional else shown


def _annotation(item: Field[Any]) -> tuple[str, bool]:
    """Return the name of an option's type, and whether it may be ``auto``."""
    text = item.type if isinstance(item.type, str) else getattr(item.type, "__name__", "")
    wanted, _, optional = (text or str(item.type)).partition(" | ")
    return wanted, bool(optional)


def _converted(value: Any, wanted: str) -> Value | None:
    """Convert a value to a type by its name; None if it cannot be."""
    if wanted == "bool":
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        return value if isinstance(value, bool) else None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if wanted == "str":
        return str(value)
    return _whole_number(value) if wanted == "int" else _number(value)


def _number(value: str | float) -> float | None:
    with suppress(ValueError, OverflowError):
        number = float(value)
        if math.isfinite(number):
            return number
    return None


def _whole_number(value: str | float) -> int | None:
    """Return a value as an exact whole number; None if it is not one."""
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        # Not converted through float if possible: a large seed would lose digits.
        with suppress(ValueError):
            return int(value)
        with suppress(ValueError):  # "1e3"
            value = float(value)
    return int(value) if isinstance(value, float) and value.is_integer() else None


def _shown(value: Any) -> str:
    """Return a value as shown in an error message, shortened if it is long."""
    try:
        text = repr(value)
    # Python refuses to write a whole number with too many digits.
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"
    return shortened(text, 80)


def _is_writable(text: str) -> bool:
    """Return whether a text can be encoded in UTF-8 and has no null character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def listed(names: tuple[str, ...]) -> str:
    """Return names as a list in a sentence."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
