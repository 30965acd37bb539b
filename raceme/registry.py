"""Names that users type, and the objects they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from raceme.errors import unknown_name


class Registry(Mapping[str, Any]):
    """A read-only map from names to objects that are imported when first asked for.

    Parameters
    ----------
    kind : str
        What is registered, in the singular, for error messages: ``"strategy"``.
    targets : Mapping[str, str]
        Name to ``"module:attribute"``.
    """

    def __init__(self, kind: str, targets: Mapping[str, str]) -> None:
        self._kind = kind
        self._targets = dict(targets)

    def __getitem__(self, name: str) -> Any:
        """Return the object registered under `name`.

        Raises
        ------
        UserError
            When no such name exists; it lists the valid names and the nearest match.
        """
        if name not in self._targets:
            raise unknown_name(self._kind, name, self._targets)
        module, attribute = self._targets[name].split(":")
        return getattr(import_module(module), attribute)

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)

    def __contains__(self, name: object) -> bool:
        return name in self._targets

    def summaries(self) -> dict[str, str]:
        """Return the first line of each object's docstring, by name."""
        return {
            name: (self[name].__doc__ or "").strip().splitlines()[0] if self[name].__doc__ else ""
            for name in self
        }
