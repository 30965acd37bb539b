"""How accurate a run is over the steps of data that change."""

from __future__ import annotations

from raceme.protocol.events import Evaluated


class StepAccuracies:
    """The first and the last evaluation on the data of each step, an observer of evaluations."""

    def __init__(self) -> None:
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}

    def observe(self, event: Evaluated) -> None:
        """Take note of an evaluation; its step is the latest that any client was tested on."""
        step = max(event.steps.values(), default=0)
        if step in self._first:
            self._last[step] = float(event.accuracy)
        else:
            self._first[step] = float(event.accuracy)

    def result(self, measure: str = "accuracy") -> dict[str, float | None]:
        """Return the means over the steps, ready for JSON; None where data do not change.

        Parameters
        ----------
        measure : str
            What was measured, for the keys: ``"accuracy"`` or ``"mae"``.

        Notes
        -----
        At a step's start models are tested that have not been trained on its data, if the run's key
        ``eval-steps`` is set (prequential evaluation); step 0 has no models before it. At its end
        they have; a step that was tested once has no end.
        """
        starts = [accuracy for step, accuracy in self._first.items() if step]
        ends = list(self._last.values()) if starts else []
        return {
            f"{measure}_at_step_starts": sum(starts) / len(starts) if starts else None,
            f"{measure}_at_step_ends": sum(ends) / len(ends) if ends else None,
        }
