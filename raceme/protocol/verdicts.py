"""What a run's protection does with updates, and how it is reported."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What a run's protection does with an update."""

    ACCEPTED = "accepted"
    """It goes to the method as it came; this is not reported."""
    SCALED = "scaled"
    """It goes to the method shorter than it came."""
    REFUSED = "refused"
    """The method does not see it."""
    EXCLUDED = "excluded"
    """Nor will it see later ones of this client, which agree with nobody's."""
    READMITTED = "readmitted"
    """The client's updates agree with others' now: this one goes to the method again."""

    @property
    def keeps_out(self) -> bool:
        """Whether the method does not see the update."""
        return self in (Verdict.REFUSED, Verdict.EXCLUDED)


@dataclass(frozen=True)
class UpdateJudged:
    """A run's protection did something to a valid update, or to its client.

    What is refused is reported as `UpdateRejected` beside, what is not as `UpdateApplied`.

    Attributes
    ----------
    verdict : Verdict
        What; never `ACCEPTED`.
    measured, bound : float
        What was measured of it, and the bound for that: lengths of updates, or how far the client's
        updates agree with others', from −2 to 2.
    reason : str
        Why, in words without numbers: the same for all that are judged alike.
    cluster : int or None
        The main cluster of the client; None if it has none yet.
    """

    time: float
    client: str
    verdict: Verdict
    measured: float
    bound: float
    reason: str
    cluster: int | None = None
