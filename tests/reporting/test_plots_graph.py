"""Support between clusters: reported by a method, kept, summarised and drawn."""

from __future__ import annotations

from pathlib import Path

from fleets import grid_of, pulled_app
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.text import Annotation
from runs import ONES, devices, of, run
from summaries import summarise

from raceme.core.clusters import Model
from raceme.core.config import RunConfig, write_toml
from raceme.core.events import (
    ClientJoined,
    ClusterChange,
    ClustersChanged,
    Event,
    Measured,
    RunEnded,
)
from raceme.core.requests import Outcome, Update
from raceme.records.record import RunRecord
from raceme.records.store import RunStore, read_events
from raceme.reporting.artefacts import write_all
from raceme.reporting.plots import counts_over_time, graph_figure
from raceme.reporting.run_page import run_page
from raceme.reporting.style import cluster_colour
from raceme.strategies import FedAsync
from raceme.strategies.faacl.strategy import SUPPORTERS


def support_changed(time: float, updates: int, supporters: dict[int, tuple[int, ...]]) -> Measured:
    return Measured(time, updates, SUPPORTERS, {"supporters": supporters})


def change(
    time: float, kind: ClusterChange, clusters: dict[str, int], gone: tuple[int, ...] = ()
) -> ClustersChanged:
    made = tuple(set(clusters.values())) if kind is not ClusterChange.ASSIGN else ()
    members = {client: {cluster: 1.0} for client, cluster in clusters.items()}
    return ClustersChanged(time, 0, kind, members, gone, made)


# Clusters 0, 1 and 2 support each other in part; 0 and 1 become 3, which then supports 2 only.
RUN: list[Event] = [
    *(ClientJoined(0.0, client, 0, 10, group) for client, group in zip("abcd", (0, 0, 1, 1))),  # noqa: B905
    change(0.0, ClusterChange.ASSIGN, {"a": 0, "b": 1, "c": 2, "d": 2}),
    support_changed(1.0, 1, {0: (1,), 1: (0,), 2: (0, 1)}),
    change(2.0, ClusterChange.MERGE, {"a": 3, "b": 3}, (0, 1)),
    support_changed(2.0, 2, {2: (3,)}),
    RunEnded(4.0, 4, "so"),
]


def test_clusters_and_supports_are_counted_over_time() -> None:
    assert counts_over_time(RunRecord.of(RUN), SUPPORTERS) == (
        [0.0, 1.0, 2.0],
        [3, 3, 2],
        [0, 4, 1],
    )


def arrows(axes: Axes) -> list[Annotation]:
    return [text for text in axes.texts if isinstance(text, Annotation)]


def test_an_arrow_leads_from_the_supporter_to_the_supported() -> None:
    graph, counts = graph_figure(RunRecord.of(RUN), SUPPORTERS).axes
    (arrow,) = arrows(graph)
    names = {text.get_text(): text.get_position() for text in graph.texts if text.get_text()}
    assert (tuple(arrow.xyann), tuple(arrow.xy)) == (names["3"], names["2"])
    assert list(names) == ["2", "2 clients", "3"]
    faces = [to_hex(dots.get_facecolor()[0]) for dots in graph.collections]  # type: ignore[index]
    assert faces == [cluster_colour(2), cluster_colour(3)]
    drawn = {str(line.get_label()): line.get_ydata() for line in counts.lines}
    assert {name: list(y) for name, y in drawn.items()} == {
        "clusters": [3, 3, 2, 2],
        "supporters": [0, 4, 1, 1],
    }


def test_the_area_grows_with_the_clients_and_a_cluster_without_any_is_an_outline() -> None:
    clusters = {"a": 5, "b": 5, "c": 5, "d": 6}
    events = [
        *RUN[:4],
        change(0.0, ClusterChange.ASSIGN, clusters),
        support_changed(1.0, 1, {5: (6,), 6: (5, 7)}),
    ]
    graph = graph_figure(RunRecord.of(events), SUPPORTERS).axes[0]
    areas = [float(dots.get_sizes()[0]) for dots in graph.collections]  # type: ignore[attr-defined]
    assert areas == [600.0, 300.0, 150.0]
    assert to_hex(graph.collections[2].get_facecolor()[0]) == "#ffffff"  # type: ignore[index]
    assert len(arrows(graph)) == 3
    assert "0 clients" in [text.get_text() for text in graph.texts]


def test_of_very_many_clusters_the_largest_are_drawn() -> None:
    clusters = {f"c{index}": max(0, index - 4) for index in range(44)}
    events: list[Event] = [
        *(ClientJoined(0.0, client, 0, 10, None) for client in clusters),
        change(0.0, ClusterChange.ASSIGN, clusters),
        support_changed(1.0, 1, {0: (1, 39), 39: (38,)}),
    ]
    graph = graph_figure(RunRecord.of(events), SUPPORTERS).axes[0]
    assert graph.get_title(loc="left") == "Support between clusters at the end (24 of 40 clusters)"
    assert len(arrows(graph)) == 1


def test_there_may_be_no_support_at_the_end() -> None:
    graph = graph_figure(RunRecord.of([*RUN[:-1], support_changed(3.0, 3, {})]), SUPPORTERS).axes[0]
    assert graph.get_title(loc="left") == "Support between clusters at the end: none"


def test_a_run_without_support_has_no_picture_and_says_so(tmp_path: Path) -> None:
    plain: list[Event] = [ClientJoined(0.0, "a", 0, 10, None), RunEnded(1.0, 0, "so")]
    (axes,) = graph_figure(RunRecord.of(plain), SUPPORTERS).axes
    assert axes.texts[-1].get_text() == "not measured"
    for name, events in (("without", plain), ("with", RUN)):
        folder = tmp_path / name
        with RunStore(folder) as store:
            for event in events:
                store.observe(event)
        write_toml(RunConfig().to_mapping(), folder / "config.toml")
        summary = summarise(events, strategy="casa", dataset="digits", seed=0, wall_time=1.0)
        assert summary.get("supporters") == (None if name == "without" else {"2": [3]})
        assert write_all(folder, summary=summary, models={}) == {}
        assert (folder / "support.png").exists() is (name == "with")
        assert ('id="support"' in run_page(folder, "")) is (name == "with")


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
