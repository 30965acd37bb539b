"""Bytes that a run sent and received, by what the method did meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from raceme.protocol.events import AnswerTaken, UpdateApplied


@dataclass
class PhaseTraffic:
    """The traffic of one phase.

    Attributes
    ----------
    down, up : int
        Bytes of the arrays to the clients, and from them.
    messages : int
        Pieces of work that were answered, with one message each way.
    """

    down: int = 0
    up: int = 0
    messages: int = 0


class Traffic:
    """The traffic of updates and of answers to other work, an observer of these.

    Attributes
    ----------
    phases : dict[str, PhaseTraffic]
        By phase, in the order in which they began.
    """

    def __init__(self) -> None:
        self.phases: dict[str, PhaseTraffic] = {}

    @property
    def down(self) -> int:
        """Bytes to the clients in all."""
        return sum(phase.down for phase in self.phases.values())

    @property
    def up(self) -> int:
        """Bytes from the clients in all."""
        return sum(phase.up for phase in self.phases.values())

    def observe(self, event: UpdateApplied | AnswerTaken) -> None:
        """Count one piece of work."""
        phase = self.phases.setdefault(event.phase, PhaseTraffic())
        phase.down += int(event.bytes_down)
        phase.up += int(event.bytes_up)
        phase.messages += 1

    def result(self) -> dict[str, dict[str, int]]:
        """Return the traffic of each phase, ready for JSON."""
        return {
            name: {"down": phase.down, "up": phase.up, "messages": phase.messages}
            for name, phase in self.phases.items()
        }
