"""Runs and comparisons in Python: data frames, figures and models."""

from __future__ import annotations

import html
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from io import StringIO
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from rich.console import Console

from raceme.core.config import CONFIG, read_toml
from raceme.core.errors import UserError, plural
from raceme.core.events import grouped
from raceme.core.installation import install_line
from raceme.core.options import Value
from raceme.core.registry import STRATEGIES
from raceme.experiments.compare import SuitePlan, compare
from raceme.experiments.page import purity_figure, times_figure
from raceme.experiments.results import Comparison, Run, read_comparison, read_runs
from raceme.experiments.tables import main_table, purity_table, times_table, to_csv, to_latex
from raceme.records.exchanges import CLIENTS
from raceme.records.folder import COMPARISON, STORE, SUMMARY, clusters_in, model_file, read_model
from raceme.records.record import RunRecord, read_run
from raceme.records.similarity import read_similarity
from raceme.reporting.artefacts import draw_similarity, export_model, missing_line
from raceme.reporting.console import summary_rows
from raceme.reporting.plots import (
    accuracy_figure,
    clusters_figure,
    comparison_figure,
    devices_figure,
)
from raceme.reporting.run_page import read_summary
from raceme.reporting.style import CLOCK

if TYPE_CHECKING:
    import pandas as pd

    from raceme.runs.experiment import RunOutcome
    from raceme.simulation.apps import Settings


log = logging.getLogger("raceme")


class OpenRun:
    """A finished run, or a snapshot of a running one.

    Tables are pandas data frames with a row per event and the names of :mod:`raceme.core.events`;
    figures are matplotlib's. All are loaded on demand.

    Parameters
    ----------
    folder : Path
        Folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: Mapping[str, Value] = read_toml(folder / CONFIG)

    def __repr__(self) -> str:
        return f"<{self.title}: {plural(len(self.record.updates.seq), 'update')}, {self.folder}>"

    def _repr_html_(self) -> str:
        if not self._is_over:
            return html.escape(repr(self))
        return _html_table(self.title, summary_rows(self.summary))

    @property
    def title(self) -> str:
        """The method and the dataset."""
        method = STRATEGIES.short(str(self.config.get("strategy")))
        return f"{method} on {self.config.get('dataset')}"

    @cached_property
    def record(self) -> RunRecord:
        """The run as columns of numbers; needs no pandas."""
        return read_run(self.folder)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The content of ``summary.json``.

        Raises
        ------
        UserError
            The run is unfinished, or the file is damaged.
        """
        return read_summary(self.folder)

    @property
    def _is_over(self) -> bool:
        """Whether there is a summary."""
        return (self.folder / SUMMARY).is_file()

    @property
    def updates(self) -> pd.DataFrame:
        """The applied updates, in order of time."""
        return _columns(self.record.updates)

    @property
    def rejections(self) -> pd.DataFrame:
        """The unused replies."""
        return _columns(self.record.rejections)

    @property
    def evaluations(self) -> pd.DataFrame:
        """The evaluations, means over the clients."""
        return _columns(self.record.evaluations)

    @property
    def accuracy(self) -> pd.Series[float]:
        """The mean accuracy of the clients over time, in seconds."""
        return self.evaluations.set_index("time")["accuracy"]

    @property
    def clusters(self) -> dict[int, list[str]]:
        """The final clients of each cluster, by number."""
        placed = sorted(self.record.assignment().items())
        return dict(sorted(grouped((cluster, client) for client, cluster in placed).items()))

    @property
    def models(self) -> dict[int, dict[str, Any]]:
        """The final model of each cluster: arrays by name, by cluster number."""
        return {number: self.model(number) for number in clusters_in(self.folder)}

    @property
    def client_evaluations(self) -> pd.DataFrame:
        """Each client's result at each evaluation, with time and updates."""
        frame = _columns(self.record.client_evaluations)
        when = self.record.evaluations
        frame.insert(1, "time", when.time[frame["evaluation"]])
        frame.insert(2, "updates", when.updates[frame["evaluation"]])
        return frame

    @property
    def clients(self) -> pd.DataFrame:
        """The clients: time of joining, examples, true group, last cluster."""
        cluster = self.record.assignment()
        return _frame(
            {
                name: getattr(client, name)
                for name in ("client", "joined_at", "num_examples", "group")
            }
            | {"cluster": cluster.get(client.client)}
            for client in self.record.clients
        )

    @property
    def placements(self) -> pd.DataFrame:
        """Every change of a client's clusters, a row per cluster and weight."""
        return _frame(
            (
                (placed.time, placed.client, cluster, weight)
                for placed in self.record.placements
                for cluster, weight in placed.weights.items()
            ),
            ("time", "client", "cluster", "weight"),
        )

    @property
    def changes(self) -> pd.DataFrame:
        """Splits, merges and the like, without first assignments."""
        return _frame(
            (
                (
                    event.time,
                    event.updates,
                    event.change.value,
                    event.gone,
                    event.made,
                    len(event.memberships),
                    event.score,
                    event.threshold,
                )
                for event in self.record.changes
                if event.gone or event.made or event.change.value == "move"
            ),
            ("time", "updates", "change", "gone", "made", "clients", "score", "threshold"),
        )

    def model(self, of: int | str) -> dict[str, Any]:
        """Return a model's arrays by name.

        Parameters
        ----------
        of : int or str
            Cluster, or client of a run with ``client-models``.

        Raises
        ------
        UserError
            There is no such model.
        """
        path = model_file(self.folder, of)
        if path.is_file():
            return read_model(path)
        if isinstance(of, str):
            raise UserError(
                f"There is no model of client '{of}': runs leave them with client-models=true."
            )
        raise UserError(f"There is no model of cluster {of}; there are {clusters_in(self.folder)}.")

    def export(
        self,
        kind: str = "safetensors",
        *,
        cluster: int | None = None,
        device: str | None = None,
        labels: Sequence[str] = (),
        out: str | Path | None = None,
        trust: str | Path = "",
    ) -> Path:
        """Write a model for use without Raceme, as `raceme export` does; return its folder.

        Raises
        ------
        UserError
            There is no such model or format, the folder exists, or the run names a model or dataset
            of one's own and is not in the folder `trust`.
        """
        folder = None if out is None else Path(out)
        return export_model(
            self.folder,
            kind,
            cluster=cluster,
            device=device,
            labels=labels,
            out=folder,
            trust=str(trust),
        )[0]

    def plot_accuracy(self) -> Figure:
        """Draw the accuracy over time, as in ``accuracy.png``."""
        target = self.summary.get("target") if self._is_over else None
        return accuracy_figure(self.record, target=target, clock=self._clock)

    def plot_clusters(self) -> Figure:
        """Draw the clusters and their clients over time, as in ``clusters.png``."""
        return clusters_figure(self.record, clock=self._clock)

    def plot_devices(self) -> Figure:
        """Draw devices' work over time, as in ``devices.png``."""
        return devices_figure(self.record, clock=self._clock)

    def plot_similarity(self) -> Figure:
        """Draw the final similarity of clients, as in ``similarity.png``."""
        return draw_similarity(self.record, read_similarity(self.folder))

    @property
    def _clock(self) -> str:
        return "time" if self.record.on_devices else CLOCK


class OpenComparison:
    """A finished comparison.

    Parameters
    ----------
    folder : Path
        Folder of the results of `raceme compare` or `raceme reproduce`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: Comparison = read_comparison(folder)

    def __repr__(self) -> str:
        methods = plural(len(self.results.results), "method")
        return f"<{self.results.suite.title}: {methods}, {self.folder}>"

    def _repr_html_(self) -> str:
        text = main_table(self.results)
        return _html_table(text.title, text.rows, text.columns) + _html_lines(text.lines)

    @property
    def table(self) -> pd.DataFrame:
        """A row per method with means and deviations, as the command prints them.

        Its ``to_latex("table.tex")`` writes the table for a paper, as ``compare.tex``.
        """
        text = main_table(self.results)
        columns = [column.replace("\n", " ") for column in text.columns]
        cells = [[cell.replace("**", "") for cell in row] for row in text.rows]
        frame = _frame(cells, columns).set_index("method")
        return _for_papers(frame, to_latex(self.results), text.lines)

    @property
    def rows(self) -> pd.DataFrame:
        """A row of numbers per method and seed, as in ``compare.csv``."""
        frame: pd.DataFrame = _pandas().read_csv(StringIO(to_csv(self.results)))
        return frame

    @property
    def purity(self) -> pd.DataFrame:
        """The final purity of each method's clusters, a column per seed.

        Its ``to_latex("purity.tex")`` writes these and their mean.
        """
        text = to_latex(self.results, purity_table(self.results))
        return self._by_seed(lambda run: run.summary.get("purity"), text)

    @property
    def times(self) -> pd.DataFrame:
        """Virtual time to the target in seconds, a column per seed; NaN: not reached.

        Its ``to_latex("times.tex")`` writes these and their mean.
        """
        return self._by_seed(
            lambda run: run.time, to_latex(self.results, times_table(self.results))
        )

    def _by_seed(self, value: Callable[[Run], float | None], latex: str) -> pd.DataFrame:
        """Return a row per method and a column per seed."""
        found = {
            result.label: {run.seed: value(run) for run in result.runs}
            for result in self.results.results
        }
        columns = self.results.suite.seeds
        frame = _pandas().DataFrame(found, columns=list(found), index=columns, dtype=float).T
        return _for_papers(frame.rename_axis("method").rename_axis("seed", axis=1), latex)

    @cached_property
    def runs(self) -> dict[tuple[str, int], OpenRun]:
        """The existing runs, by method and seed."""
        return {
            (result.label, run.seed): OpenRun(self.folder / run.folder)
            for result in self.results.results
            for run in result.runs
            if (self.folder / run.folder / STORE).is_file()
        }

    def plot_accuracy(self) -> Figure:
        """Draw the methods' accuracies over time: mean and standard deviation over the seeds."""
        runs, _ = read_runs(self.folder, self.results)
        return comparison_figure(runs, target=self.results.target)

    def plot_times(self) -> Figure:
        """Draw each method's time to the target."""
        return times_figure(self.results)

    def plot_purity(self) -> Figure:
        """Draw the purity of each method's clusters."""
        return purity_figure(self.results)


class OpenSimulation:
    """Results of a Flower app on virtual time (`raceme simulate`).

    Parameters
    ----------
    folder : Path
        Folder of the results.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.summary: dict[str, Any] = read_summary(folder)

    def __repr__(self) -> str:
        ended = f"{self.summary['ending']} after {self.summary['virtual_time']:.1f} s"
        return f"<{self.summary['app']} {ended}, {self.folder}>"

    @property
    def clients(self) -> pd.DataFrame:
        """A row per client: tasks, times at work, idle and offline, bytes."""
        frame: pd.DataFrame = _pandas().read_csv(self.folder / CLIENTS)
        return frame


def simulated(settings: Settings) -> OpenSimulation:
    """Run a Flower app on virtual time and write its results.

    Warns if the app ended in another way than by returning.
    """
    from raceme.simulation.apps import simulate, write_results

    found = simulate(settings)
    _, unwritten = write_results(found)
    if unwritten:
        log.warning("%s could not be written", ", ".join(unwritten))
    if found.reason:
        log.warning("The app ended early: %s", found.reason)
    return OpenSimulation(found.out)


def opened(outcome: RunOutcome) -> OpenRun:
    """Open a run that has just ended; warn if it ended early by itself, or lacks artefacts."""
    if not (outcome.complete or outcome.interrupted):
        log.warning("The run ended early: %s", outcome.summary["reason"])
    if outcome.unwritten:
        log.warning("%s", missing_line(outcome.out, outcome.unwritten))
    return OpenRun(outcome.out)


def compared(plan: SuitePlan, processes: int, console: Console, formats: Sequence[str]) -> bool:
    """Run a comparison; on interruption, write the tables of finished runs.

    Warns of failed runs.

    Returns
    -------
    bool
        Whether it finished without interruption.

    Raises
    ------
    UserError
        The number of processes is invalid.
    """
    if not isinstance(processes, Integral) or processes < 0:
        raise UserError(f"processes must be a whole number of at least 0, got {processes!r}.")
    from raceme.simulation import cores

    try:
        comparison = compare(plan, processes or cores(), console, formats=formats)
    except KeyboardInterrupt:
        comparison = compare(plan, 1, Console(quiet=True), lambda *_: {}, formats)
        done = sum(len(result.runs) for result in comparison.results)
        log.warning(
            "Interrupted: %d of %d runs are finished; the same call with out=%r does the others.",
            done,
            len(plan.plain) + len(plan.further),
            str(plan.out),
        )
        return False
    for result in comparison.results:
        for seed, error in result.errors.items():
            log.warning("%s, seed %d failed: %s", result.label, seed, error)
    return True


def open_folder(folder: str | Path) -> OpenRun | OpenComparison:
    """Open the results of a command.

    Raises
    ------
    UserError
        The folder has neither a run nor a comparison.
    """
    path = Path(folder).expanduser()
    if (path / COMPARISON).is_file():
        return OpenComparison(path)
    if (path / STORE).is_file():
        return OpenRun(path)
    raise UserError(
        f"{path} has no results: expected what `raceme run` (run.sqlite) or `raceme compare` "
        f"({COMPARISON}) leaves."
    )


def _for_papers(frame: Any, latex: str, lines: Sequence[str] = ()) -> pd.DataFrame:
    """Return a data frame whose ``to_latex`` writes a table for a paper; lines are shown below."""

    class PaperTable(_pandas().DataFrame):  # type: ignore[misc]
        """A data frame with LaTeX output for papers; derived data frames are ordinary ones."""

        def __repr__(self) -> str:
            # pandas would omit columns in the middle.
            return "\n".join([self.to_string(), *lines])

        def _repr_html_(self) -> str:
            return str(super()._repr_html_()) + _html_lines(lines)

        def to_latex(self, buf: Any = None, **options: Any) -> str | None:
            """Return or write the table for a paper; with options, as pandas does."""
            if options:
                return super().to_latex(buf, **{"escape": True, **options})  # type: ignore[no-any-return]
            if buf is None:
                return latex
            if hasattr(buf, "write"):
                buf.write(latex)
            else:
                Path(buf).write_text(latex, encoding="utf-8")
            return None

    table: pd.DataFrame = PaperTable(frame)
    return table


def _columns(columns: Any) -> pd.DataFrame:
    return _frame(vars(columns))


def _frame(data: Any, columns: Sequence[str] | None = None) -> pd.DataFrame:
    # Named even without rows.
    frame: pd.DataFrame = _pandas().DataFrame(data, columns=columns)
    return frame


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise UserError(f"Tables need pandas: {install_line('notebook')}") from None
    return pandas


def _html_lines(lines: Iterable[str]) -> str:
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def _html_table(title: str, rows: Iterable[Iterable[str]], heads: Iterable[str] = ()) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    caption = f"<caption>{html.escape(title)}</caption>"
    return f"<table>{caption}{top}<tbody>{body}</tbody></table>"
