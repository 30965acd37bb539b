"""Support between clusters: reported by a method, kept and summarised."""

from __future__ import annotations

from pathlib import Path

from fleets import grid_of, pulled_app
from runs import ONES, devices, of, run
from summaries import summarise

from raceme.core.clusters import Model
from raceme.core.events import ClientJoined, Event, Measured, RunEnded
from raceme.core.requests import Outcome, Update
from raceme.records.store import RunStore, read_events
from raceme.strategies import FedAsync
from raceme.strategies.faacl.strategy import SUPPORTERS


def support_changed(time: float, updates: int, supporters: dict[int, tuple[int, ...]]) -> Measured:
    return Measured(time, updates, SUPPORTERS, {"supporters": supporters})


def test_the_summary_has_the_supporters_at_the_end() -> None:
    joined, ended = ClientJoined(0.0, "a", 0, 10, None), RunEnded(4.0, 4, "so")
    first, last = support_changed(1.0, 1, {0: (1,), 1: (0,)}), support_changed(2.0, 2, {2: (3,)})
    reported: list[Event] = [joined, first, last, ended]
    about = {"strategy": "casa", "dataset": "digits", "seed": 0, "wall_time": 1.0}
    assert summarise(reported, **about)["supporters"] == {"2": [3]}
    assert "supporters" not in summarise([joined, ended], **about)


class Supported(FedAsync):
    """FedAsync whose second cluster is supported by the first from its second update on."""

    def on_update(self, update: Update) -> Outcome:
        if self.progress.updates == 1:
            other = self.clusters.found(Model(ONES), [])
            self.report(support_changed(self.now(), self.progress.updates + 1, {other: (0,)}))
        return super().on_update(update)


def test_what_a_method_reports_of_support_comes_after_its_update_and_is_kept(
    tmp_path: Path,
) -> None:
    seen = run(Supported(), grid_of(pulled_app(), devices(1.0)), num_rounds=3)
    (found,) = of(Measured, seen)
    assert (found.time, found.updates, found.value) == (2.0, 2, {1: (0,)})
    assert seen[seen.index(found) - 2].seq == 2
    with RunStore(tmp_path) as store:
        for event in seen:
            store.observe(event)
    assert [event for event in read_events(tmp_path) if event == found] == [found]
