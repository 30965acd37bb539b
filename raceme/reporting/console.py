"""Terminal output: a live line during a run, a table at its end."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from raceme.core import events
from raceme.core.errors import plural, shortened
from raceme.core.events import Event, EventHandler, change_line, home, is_news
from raceme.records.folder import LOG
from raceme.records.summary import RunSummary, unlearned

QUIET_SECONDS = 10.0
"""Interval of status lines without a live line."""


class Pace:
    """Rate of progress and remaining time.

    Parameters
    ----------
    clock : Callable
        Returns the wall time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._started = clock, clock()
        self._first: int | None = None
        self._done = 0

    def reached(self, done: int) -> None:
        """Record the progress; the first value may be above 0 after a resumption."""
        if done and self._first is None:
            self._first = done - 1
        self._done = done

    @property
    def rate(self) -> float:
        """Progress per second; 0 if unknown."""
        elapsed = self._clock() - self._started
        done = self._done - (self._first or 0)
        return done / elapsed if done > 0 and elapsed > 0 else 0.0

    def seconds_left(self, total: int) -> float | None:
        """Return the remaining seconds; None if unknown or finished."""
        if not self.rate or self._done >= total:
            return None
        return (total - self._done) / self.rate


def shown_seconds(seconds: float) -> str:
    """Format a span of time in a suitable unit."""
    if seconds < 99.5:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} d"


def shown_updates(done: int, planned: int) -> str:
    """Format the number of updates, with the planned number if useful.

    Runs that end after a round, window or time may exceed the plan, or have none.
    """
    return f"{done} of {planned} updates" if 0 < planned >= done else plural(done, "update")


class LiveBars(Progress):
    """Progress bars that are live on a terminal and in a notebook.

    In a notebook, the bars are one output of the cell that is replaced; rich's own way needs
    ipywidgets.

    Parameters
    ----------
    *columns : str or ProgressColumn
        Content of each bar.
    console : Console
        The terminal, the notebook or the file; the bars are not shown in a file.
    **options
        Options of rich's progress bars.
    """

    def __init__(self, *columns: str | ProgressColumn, console: Console, **options: Any) -> None:
        super().__init__(*columns, console=console, disable=not console.is_terminal, **options)
        self._in_cell = console.is_jupyter and not console.quiet
        self._cell: Any = None

    @property
    def shown(self) -> bool:
        """Whether the bars are visible."""
        return self._in_cell or not self.disable

    def start(self) -> None:
        """Show the bars."""
        super().start()
        if self._in_cell:
            from IPython.display import display

            self._cell = display(self, display_id=True)

    def refresh(self) -> None:
        """Update the bars."""
        super().refresh()
        if self._cell is not None:
            self._cell.update(self)

    def stop(self) -> None:
        """Stop updating the bars; transient ones disappear from a terminal."""
        super().stop()
        self.refresh()
        self._cell = None


class RunProgress(EventHandler):
    """Shows the progress of a run, as observer and context manager.

    On a terminal and in a notebook it is one live line with a bar. Elsewhere it prints a plain line
    at each evaluation, and after ten seconds without output.

    Parameters
    ----------
    max_updates : int
        Updates after which the run ends.
    each_update : bool
        Print a line for every update, for real devices.
    console : Console, optional
        Console to print to; by default standard output.
    clock : Callable
        Returns the wall time in seconds.
    """

    def __init__(
        self,
        max_updates: int,
        each_update: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._console = console or Console(highlight=False)
        self._each_update = each_update
        self._max_updates = max_updates
        self._summary = RunSummary()
        self._pace = Pace(clock)
        self._clock = clock
        self._drawn_at = 0.0
        self._printed_at = clock()
        bar = LiveBars(
            # Fits into eighty columns.
            BarColumn(bar_width=10),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[line]}"),
            console=self._console,
            auto_refresh=False,
        )
        self._line = bar.add_task("run", total=max_updates, line="")
        self._bar = bar if bar.shown else None

    def __enter__(self) -> RunProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._draw(left="")
            self._bar.stop()

    def observe(self, event: Event) -> None:
        """Process an event and show the progress."""
        if isinstance(event, events.ClustersChanged):
            self._print_moves(event)
        self._summary.observe(event)
        self._pace.reached(self._summary.updates)
        self(event)
        now = self._clock()
        if self._bar is None and now - self._printed_at >= QUIET_SECONDS:
            done = shown_updates(self._summary.updates, self._max_updates)
            self._print(f"{done}: {self._status()}{self._left()}")
        # At most ten times a second, since drawing costs more than an update.
        if self._bar is not None and now - self._drawn_at > 0.1:
            self._draw()

    def on_clusters_changed(self, event: events.ClustersChanged) -> None:
        """Print a split, a merge and the like."""
        if is_news(event):
            self._print(change_line(event))

    def _print_moves(self, event: events.ClustersChanged) -> None:
        """Print real devices that move, before the summary has their new clusters."""
        if not self._each_update or event.change is not events.ClusterChange.MOVE:
            return
        former = self._summary.membership.weights
        for client, weights in event.memberships.items():
            before, now = home(former.get(client, {})), home(weights)
            if before is not None and before != now:
                self._print(f"moved  {client}  cluster {before} → {now}")

    def on_data_changed(self, event: events.DataChanged) -> None:
        """Print a change of all data; single clients may change with every update."""
        if event.client is None or self._each_update:
            self._print(data_line(event))

    def on_client_joined(self, event: events.ClientJoined) -> None:
        """Print a real device that comes online."""
        if self._each_update:
            labels = f"  {event.labels}" if event.labels else ""
            self._print(f"online  {event.client}  {plural(event.num_examples, 'sample')}{labels}")

    def on_client_left(self, event: events.ClientLeft) -> None:
        """Print a real device that goes offline."""
        if self._each_update:
            self._print(f"offline  {event.client}")

    def on_update_rejected(self, event: events.UpdateRejected) -> None:
        """Print a reply that was not used; in a simulation the first."""
        if self._each_update:
            self._print(f"rejected  {event.client}: {event.reason}")
        elif self._summary.rejected == 1:
            self._print(f"rejected  {event.client}: {event.reason} (further ones: {LOG})")

    def on_update_applied(self, event: events.UpdateApplied) -> None:
        """Print an update of a real device."""
        if self._each_update:
            self._print(update_line(event))

    def on_evaluated(self, event: events.Evaluated) -> None:
        """Print an evaluation if there is no live line."""
        if self._bar is None:
            self._print(f"evaluated at {plural(event.updates, 'update')}: {self._status()}")

    def _print(self, line: str) -> None:
        self._printed_at = self._clock()
        self._console.print(line, markup=False, soft_wrap=True)

    def _left(self) -> str:
        seconds = self._pace.seconds_left(self._max_updates)
        return "" if seconds is None else f" · {shown_seconds(seconds)} left"

    def _draw(self, left: str | None = None) -> None:
        assert self._bar is not None, "only called with a live line"
        self._drawn_at = self._clock()
        # The remaining time replaces the rate.
        line = self._status(rate=False) + (self._left() if left is None else left)
        done = self._summary.updates
        self._bar.update(self._line, completed=done, total=max(done, self._max_updates), line=line)
        self._bar.refresh()

    def _status(self, rate: bool = True) -> str:
        """Describe the state of the run in one line."""
        summary = self._summary
        is_long = self._each_update and summary.time >= 5400
        parts = [f"t = {shown_seconds(summary.time) if is_long else f'{summary.time:.1f} s'}"]
        if summary.accuracy is not None:
            of = _answered(summary.answered, summary.asked)
            measure = summary.measure
            notes = ", ".join(filter(None, (of, f"best {measure.shown(summary.best_accuracy)}")))
            parts.append(f"{measure.word} {measure.shown(summary.accuracy)} ({notes})")
        parts.append(f"{summary.clusters} cluster{'' if summary.clusters == 1 else 's'}")
        if rate and self._pace.rate:
            parts.append(f"{self._pace.rate:.0f}/s")
        if summary.rejected:
            parts.append(f"{summary.rejected} rejected")
        return " · ".join(parts)


def data_line(event: events.DataChanged) -> str:
    """Describe a change of clients' data in one line."""
    whose = "all clients" if event.client is None else event.client
    return f"data of {whose}: step {event.step} at update {event.updates}"


def update_line(event: events.UpdateApplied) -> str:
    """Describe an update in one line."""
    # E.g. an update of a probe, or one that waits in a buffer.
    idle = "" if event.weight else " (no model changes)"
    return (
        f"update {event.seq:>4}  {event.client}  cluster {event.cluster}  "
        f"staleness {event.staleness}  weight {event.weight:.3g}{idle}  "
        f"loss {event.train_loss:.3f}  took {event.time - event.dispatched_at:.1f} s"
    )


def print_summary(
    summary: Mapping[str, Any],
    out: Path,
    console: Console | None = None,
    *,
    missing: Iterable[str] = (),
) -> None:
    """Print the result of a run and the location of its artefacts, some of which may be missing."""
    console = console or Console(highlight=False)
    title = f"{summary['strategy']} on {summary['dataset']}"
    if summary["reason"] is not None:
        title += f": {summary['reason']}"
    without = ", ".join(missing)
    what = f"Results without {without}" if without else "Results, plots and models"
    where = f"{what}: {shown_path(out)}"
    print_results(title, summary_rows(summary), where, console)


def print_results(
    title: str, rows: Iterable[tuple[str, str]], where: str, console: Console
) -> None:
    """Print names and values under a title, and the location of the rest."""
    table = Table(
        # Brackets in names and reasons are no markup.
        title=Text(title, style="bold"),
        title_justify="left",
        show_header=False,
        box=None,
        padding=(0, 2),
    )
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, Text(value))
    console.print()
    console.print(table)
    console.print(f"\n{where}", soft_wrap=True, markup=False)


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the numbers of a run as names and values, without missing ones.

    Earlier versions wrote fewer.
    """
    return list(_rows(summary))


def _rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    measure, get = events.Measure.of(summary), summary.get
    name, shown = measure.name, measure.shown
    plain = f"{shown(summary[name])} (best {shown(summary[f'best_{name}'])})"
    over = _answered(get("clients_answered"), get("clients_asked")) or "clients"
    yield measure.word, f"{plain}, mean over {over}"
    if get("diverged"):
        yield "diverged", "the loss is far above the untrained model's: lower lr"
    if guess := unlearned(summary):
        yield "learned", f"{guess}, {shown(summary['constant_guess'])}"
    if (honest := get(f"honest_{name}")) is not None:
        attackers = len(summary["attackers"])
        yield "honest clients", f"{shown(honest)}, mean without {attackers} attackers"
    if (success := get("backdoor_success")) is not None:
        yield (
            "backdoor",
            f"{_number(success)} of the honest clients' triggered samples hit the target",
        )
    last, best = get(f"weighted_{name}"), get(f"best_weighted_{name}")
    weighted = f"{shown(last)} (best {shown(best)})"
    # With equal numbers of test examples both means are equal.
    if not (last is best is None) and weighted != plain:
        yield "by test examples", f"{weighted}, weighted mean"
    if (before := get("accuracy_before")) is not None:
        yield "uploads", f"{shown(before)}, returned {shown(get('accuracy_after'))}"
    if (cluster := get("cluster_accuracy")) is not None:
        yield "clusters' models", f"{shown(cluster)}, on the server's test sets"
    if (mixture := get("mixture_divergence")) is not None:
        yield "mixtures", f"{_number(mixture)} nats, KL(true ‖ estimated)"
    if (matrix := get(f"task_{name}")) is not None:
        many = f"all {len(matrix)}" if len(matrix) > 1 else "the only one"
        mean, lost = shown(summary[f"average_{name}"]), shown(summary["forgetting"])
        yield "tasks", f"{mean}, mean over {many} at the end; forgotten {lost}"
    target, reached = get("target"), summary["time_to_target"]
    yield (
        f"time to {measure.bound(target)}" if target else "time to target",
        f"{reached['virtual_time']:.1f} s, {plural(reached['updates'], 'update')}"
        if reached
        else "not reached",
    )
    yield "clusters", str(summary["clusters"])
    if moves := get("moves"):
        times = "once" if moves == 1 else f"{moves} times"
        yield "clients moved", f"{times}, without splits and merges"
    yield "purity", _number(summary["purity"])
    yield "clients", str(summary["clients"])
    rejected, why = summary["rejected_updates"], ""
    for reason, count in list((get("rejections") or {}).items())[:1]:
        most = "" if count == rejected else f", {count} of them"
        why = f"{most}: {shortened(reason)}; see {LOG}"
    yield "updates", f"{summary['updates']} ({rejected} rejected{why})"
    if drift := get("missed_drift"):
        yield "drift", f"{drift} never happened: the run ended before drift-at"
    if attack := get("missed_attack"):
        yield "attack", f"{attack} never happened: the run ended before it began"
    rate = summary["updates_per_second"] or 0
    if get("clock") == "wall":
        # The run's clock starts with the first device and continues after a resumption.
        started = f"{summary['virtual_time']:.1f} s since the first device"
        yield "wall time", f"{started}, {summary['wall_time']:.1f} s in all ({rate:.0f} updates/s)"
    else:
        yield "virtual time", f"{summary['virtual_time']:.1f} s"
        yield "wall time", f"{summary['wall_time']:.1f} s ({rate:.0f} updates/s)"
    yield "traffic", _up_and_down(summary["bytes_up"], summary["bytes_down"])
    phases = get("bytes_by_phase") or {}
    if len(phases) > 1:
        each = (f"{phase} {_up_and_down(of['up'], of['down'])}" for phase, of in phases.items())
        yield "traffic by phase", "; ".join(each)
    if by_client := get("verdicts"):
        scaled, refused = (
            sum(counts[kind] for counts in by_client.values()) for kind in ("scaled", "refused")
        )
        excluded = len(summary["excluded_clients"])
        clients = "client" if excluded == 1 else "clients"
        words = f"{scaled} updates scaled, {refused} refused, {excluded} {clients} excluded"
        yield "verdicts", words
    for text in get("warnings", []):
        yield "warning", text
    for of in get("measures", {}).values():
        yield of["title"], f"{_shown_measure(of['value'])} {of['unit']}".rstrip()


def _shown_measure(value: Any) -> str:
    """Format a measure, for clients or clusters as a range."""
    if isinstance(value, Mapping):
        known = [number for number in value.values() if isinstance(number, int | float)]
        return f"{min(known):.4g} to {max(known):.4g}" if known else "-"
    return f"{value:.4g}" if isinstance(value, int | float) else str(value or "-")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _answered(answered: int | None, asked: int | None) -> str:
    """Describe the clients of a mean accuracy, if not all queried ones answered."""
    if answered is None or asked is None or answered >= asked:
        return ""
    return f"{answered} of {asked} clients"


def _up_and_down(up: float, down: float) -> str:
    return f"{shown_bytes(up)} up, {shown_bytes(down)} down"


def shown_bytes(count: float) -> str:
    """Format a number of bytes in a suitable unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def shown_path(path: Path) -> str:
    """Return a path relative to the current folder, if inside it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


# -----------------------------------------------------------------------------
# A table as text: for the terminal and as Markdown.
# -----------------------------------------------------------------------------


_BOLD = re.compile(r"\*\*([^*]+)\*\*")


@dataclass(frozen=True)
class PlainTable:
    """A table as text.

    Attributes
    ----------
    title : str
        Line above the table.
    columns : tuple[str, ...]
        Headings of the columns; the first column holds words, the others numbers.
    rows : tuple[tuple[str, ...], ...]
        Texts of the cells, row by row, one per column.
    lines : tuple[str, ...]
        Remarks below the table, a line each.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[str, ...] = ()

    def rich(self) -> Table:
        """Return the table for rich."""
        table = Table(
            title=escape(self.title),
            title_justify="left",
            title_style="bold",
            box=None,
            padding=(0, 1),
            collapse_padding=True,
            pad_edge=False,
        )
        # Names may wrap between words, so that a narrow terminal does not truncate them.
        words = [word for row in self.rows for word in row[0].split()]
        for index, column in enumerate(self.columns):
            table.add_column(
                column.replace("-", "-\n") if index else column,
                justify="right" if index else "left",
                no_wrap=index > 0,
                min_width=max(map(len, words), default=0) if index == 0 else None,
                style=None if index else "cyan",
            )
        for row in self.rows:
            table.add_row(*(_BOLD.sub(r"[bold]\1[/bold]", escape(cell)) for cell in row))
        return table

    def markdown(self) -> str:
        """Return the table with title and lines as Markdown."""
        heads = [column.replace("\n", " ") for column in self.columns]
        ruler = ["---", *("---:" for _ in heads[1:])]
        rows = [" | ".join(cells) for cells in (heads, ruler, *self.rows)]
        table = "\n".join(f"| {row} |" for row in rows)
        below = "".join(f"\n- {line}" for line in self.lines)
        return f"### {self.title}\n\n{table}\n" + (f"{below}\n" if below else "")
