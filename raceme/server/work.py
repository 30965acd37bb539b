"""Work: what a client is asked to do, and what the server remembers of it until the reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flwr.app import ArrayRecord

from raceme.protocol.messages import TRAIN, TRAINING

Value = str | int | float | bool | list[int]


@dataclass(frozen=True)
class Work:
    """What a method asks of a client.

    Attributes
    ----------
    client : str
        Who.
    kind : str
        What: a name in the ClientApp's registry of kinds, e.g. ``"train"``.
    models : tuple[int, ...] or None
        Clusters whose models travel, in this order. None stands for the model that serves the
        client, which with several clusters is their weighted mean; an empty tuple for no model.
    arrays : Mapping[str, ArrayRecord]
        Further arrays that travel along, by the name of their record.
    settings : Mapping[str, Value]
        What the message says beyond the run's own settings.
    phase : str
        What the method does meanwhile, for the account of bytes; if empty, the kind of work.
    is_held : bool
        Whether the client has what is sent: it travels only so that clients need no memory, and
        counts as no bytes down.
    """

    client: str
    kind: str = TRAIN
    models: tuple[int, ...] | None = None
    arrays: Mapping[str, ArrayRecord] = field(default_factory=dict)
    settings: Mapping[str, Value] = field(default_factory=dict)
    phase: str = ""
    is_held: bool = False


@dataclass(frozen=True)
class Task:
    """Work that a client was given.

    Attributes
    ----------
    number : int
        Unique in a run, from 0.
    client : str
        Who has it.
    cluster : int
        Whose model was sent; of several, the one that the client has chosen, once it is known.
    version : int
        Version of that model.
    updates : int
        Updates that had been applied in the whole run by then.
    sent_at : float
        When it was sent.
    bytes_down : int
        Size of the arrays that were sent; 0 if the client had them.
    candidates : dict[int, int]
        Where the work names models: their clusters in the order of their records, with their
        versions.
    kind : str
        What was asked for.
    step : int
        Step of the client's data that it was to work on.
    phase : str
        What the method did meanwhile.
    """

    number: int
    client: str
    cluster: int
    version: int
    updates: int
    sent_at: float
    bytes_down: int
    candidates: dict[int, int] = field(default_factory=dict)
    kind: str = TRAIN
    step: int = 0
    phase: str = ""

    @property
    def reply(self) -> str:
        """What the reply to it is called: an update is of a model that was trained."""
        return "update" if self.kind in TRAINING else "answer"
