"""Labels of clients, such as their rooms, and a condition that selects clients by label."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from raceme.core.errors import UserError, about, check_known, printable
from raceme.core.files import ReadingError, parse_toml, read_text
from raceme.core.identities import WatchedFile

if TYPE_CHECKING:
    from raceme.core.clients import Client

log = logging.getLogger("raceme")

_LABEL = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,31})=([^,=|]{1,64})")
_MOST_LABELS = 16
_LABELS_EXPECTED = "expected NAME=VALUE, e.g. room=kitchen,floor=1"


def parse_labels(text: str) -> dict[str, str]:
    """Return the labels of a text such as ``room=kitchen,floor=1``.

    Raises
    ------
    ValueError
        The text has another form, or more than 16 labels.
    """
    found = [_LABEL.fullmatch(part.strip()) for part in text.split(",")] if text.strip() else []
    labels = {match[1]: match[2].strip() for match in found if match}
    if len(labels) != len(found) or len(found) > _MOST_LABELS or not text.isprintable():
        raise ValueError(f"{printable(text, 80)!r} is not a list of labels: {_LABELS_EXPECTED}")
    return labels


def _text_of(value: object) -> str:
    if isinstance(value, str | int):
        return str(value)
    raise ValueError(f"{printable(value, 40)} is not a text")


def read_labels(path: Path) -> dict[str, dict[str, str]]:
    """Read the labels of devices: a TOML table of texts for each.

    Raises
    ------
    UserError
        It cannot be read, or holds something else.
    """
    listed = {}
    try:
        for client, own in parse_toml(read_text(path)).items():
            if not isinstance(own, dict):
                raise ValueError(f"{printable(client, 40)} is not a table")
            text = ",".join(f"{name}={_text_of(value)}" for name, value in own.items())
            listed[client] = parse_labels(text)
    except (ReadingError, ValueError) as error:
        raise UserError(
            f"labels: {path} cannot be read: {error}. It has a table for each device, [kitchen], "
            "with its labels: room = 'kitchen'."
        ) from None
    return listed


class Labels:
    """Labels of clients: those in a file take precedence over those that clients state.

    Parameters
    ----------
    path : Path, optional
        File of labels by client; see :func:`read_labels`. It is read again when it has changed.
    where : str
        Condition of clients that take part: ``room=kitchen|garden,floor=1``; empty for none. The
        label ``id`` is the client's id, and in a simulation ``group`` the true group of its data.

    Raises
    ------
    UserError
        The file cannot be read, or the condition is invalid.
    """

    def __init__(self, path: Path | None = None, where: str = "") -> None:
        self.where = where
        self._file = None if path is None else WatchedFile(path, read_labels, "labels")
        self._wanted: dict[str, list[str]] = {}
        for part in where.split(",") if where.strip() else ():
            name, _, values = part.strip().partition("=")
            if name in self._wanted:
                raise UserError(
                    f"where: {name} stands twice in {where!r}: join its values, {name}=A|B."
                )
            self._wanted[name] = [value.strip() for value in values.split("|")]
            if not all(_LABEL.fullmatch(f"{name}={value}") for value in self._wanted[name]):
                raise UserError(
                    f"where: {where!r} is not a condition: expected NAME=VALUE, e.g. room=kitchen, "
                    "or room=kitchen|garden,floor=1."
                )

    def check_ids(self, clients: Collection[str]) -> None:
        """Raise a :class:`UserError` for an id in the condition that no simulated client has."""
        for wanted in self._wanted.get("id", ()):
            check_known("client in where", wanted, clients)

    def of(self, client_id: str, stated: object) -> dict[str, str]:
        """Return the labels of a client, given those that it states."""
        labels: dict[str, str] = {}
        try:
            labels = parse_labels(stated) if isinstance(stated, str) else {}
        except ValueError as error:
            text = "The labels of %s are ignored: %s"
            log.warning(text, client_id, error, extra=about(client_id))
        if self._file is None:
            return labels
        self._file.renewed()
        return labels | self._file.content.get(client_id, {})

    def admit(self, client: Client) -> bool:
        """Return whether a client takes part."""
        return all(client.label(name) in values for name, values in self._wanted.items())
