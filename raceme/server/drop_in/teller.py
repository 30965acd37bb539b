"""What a run tells meanwhile, in the manner of Flower's strategies and to Flower's logger."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

from raceme.protocol import events
from raceme.records.words import change_line, is_news
from raceme.server.drop_in.arguments import FlowerArguments
from raceme.server.drop_in.metrics import shown
from raceme.server.interface import RunResult

log = logging.getLogger("flwr")

_MEGABYTE = 1024**2
_MOST_CLUSTERS = 8
"""Clusters that a line names."""


class Teller:
    """Logs the progress of a run.

    Parameters
    ----------
    length : str
        How long the run is, in words of its head: ``"/3"`` rounds, or nothing.
    is_virtual : bool
        Whether seconds are virtual.
    """

    def __init__(self, length: str, is_virtual: bool) -> None:
        self._length, self._clock = length, "virtual s" if is_virtual else "s"
        self._updates: list[events.UpdateApplied] = []
        self._rejected = 0
        self._began = 0.0
        self._last: events.Evaluated | None = None
        self.time = 0.0

    def observe(self, event: events.Event) -> None:
        """Take note of an event; tell it if it is news by itself."""
        self.time = event.time
        if isinstance(event, events.UpdateApplied):
            self._updates.append(event)
        elif isinstance(event, events.UpdateRejected):
            self._rejected += 1
        elif isinstance(event, events.ClustersChanged) and is_news(event):
            line = change_line(event)
            log.info("\t├── %s", line[0].upper() + line[1:])

    def round_over(self, number: int, metrics: MetricRecord | None) -> None:
        """Tell what a round's worth of updates was."""
        updates = self._updates
        log.info("")
        log.info("[ROUND %d%s]", number, self._length)
        staleness = [update.staleness for update in updates]
        parts = [
            f"{len(updates)} update{'' if len(updates) == 1 else 's'} of "
            f"{len({update.client for update in updates})} clients in "
            f"{self.time - self._began:.1f} {self._clock}"
        ]
        if any(staleness):
            mean = sum(staleness) / len(staleness)
            parts.append(f"staleness {mean:.1f} on average, {max(staleness)} at most")
        if self._rejected:
            parts.append(f"{self._rejected} replies not used")
        log.info("\t├── %s", ", ".join(parts))
        if metrics:
            log.info("\t├── Train: %s", shown(metrics))
        self._updates, self._rejected, self._began = [], 0, self.time

    def tested(self, number: int, report: events.Evaluated, metrics: MetricRecord | None) -> None:
        """Tell what clients have measured of the models of a round, and in which cluster."""
        self._last = report
        if metrics is None:
            metrics = MetricRecord({report.measure.name: report.accuracy})
        log.info(
            "\t├── Evaluate round %d (%d of %d clients): %s",
            *(number, report.answered, report.asked, shown(metrics)),
        )
        if len(means := _by_cluster(report)) > 1:
            named = [
                f"{cluster}: {report.measure.shown(mean)} ({count})"
                for cluster, (mean, count) in sorted(means.items())
            ]
            more = f" and {len(named) - _MOST_CLUSTERS} more" if len(named) > _MOST_CLUSTERS else ""
            log.info(
                "\t│\t%s by cluster (clients): %s%s",
                report.measure.word,
                ", ".join(named[:_MOST_CLUSTERS]),
                more,
            )

    def tested_without_score(self, number: int, metrics: MetricRecord) -> None:
        """Tell what clients have measured, where none of it is an accuracy or a loss."""
        log.info("\t├── Evaluate round %d: %s", number, shown(metrics))

    def tested_centrally(
        self, number: int, mean: MetricRecord, clusters: Mapping[int, MetricRecord]
    ) -> None:
        """Tell what the server has measured itself, of each cluster's model."""
        if not number:
            log.info("Initial global evaluation results: %s", shown(mean))
            return
        if len(clusters) > 1:
            for cluster, metrics in sorted(clusters.items())[:_MOST_CLUSTERS]:
                log.info("\t│\tcluster %d: %s", cluster, shown(metrics))
        log.info("\t└── Global evaluation: %s", shown(mean))

    def ended(self, result: RunResult, seconds: float) -> None:
        """Tell what a run has come to: a table of the clusters, and the result."""
        log.info("")
        log.info("Strategy execution finished in %.2fs", seconds)
        log.info("")
        log.info(
            "\t%-8s %8s  %s", "cluster", "clients", self._last.measure.word if self._last else ""
        )
        sizes = Counter(
            max(weights, key=lambda cluster: weights[cluster])
            for weights in result.client_clusters.values()
            if weights
        )
        means = {} if self._last is None else _by_cluster(self._last)
        for cluster in sorted(result.clusters):
            value = means.get(cluster)
            score = (
                "-" if value is None or self._last is None else self._last.measure.shown(value[0])
            )
            log.info("\t%-8d %8d  %s", cluster, sizes[cluster], score)
        log.info("")
        log.info("Final results:")
        log.info("")
        for line in str(result).splitlines():
            log.info("\t%s", line)
        log.info("")


def tell_start(
    name: str,
    arguments: FlowerArguments,
    length: str,
    arrays: ArrayRecord,
    train_config: ConfigRecord,
    evaluate_config: ConfigRecord,
) -> None:
    """Tell with what a strategy begins, as Flower's own do."""
    log.info("Starting %s strategy:", name)
    log.info("\t├── %s", length)
    size = sum(len(values.data) for values in arrays.values()) / _MEGABYTE
    log.info("\t├── ArrayRecord (%.2f MB)", size)
    for what, config in (("train", train_config), ("evaluate", evaluate_config)):
        told = {
            key: "<bytes>" if isinstance(value, bytes) else value for key, value in config.items()
        }
        log.info("\t├── ConfigRecord (%s): %s", what, told or "(empty!)")
    log.info("\t├──> Sampling:")
    log.info(
        "\t│\t├── Fraction: train (%.2f) | evaluate (%.2f)",
        arguments.fraction_train,
        arguments.fraction_evaluate,
    )
    log.info(
        "\t│\t├── Minimum nodes: train (%d) | evaluate (%d)",
        arguments.min_train_nodes,
        arguments.min_evaluate_nodes,
    )
    log.info("\t│\t└── Minimum available nodes: %d", arguments.min_available_nodes)
    log.info("\t└──> Keys in records:")
    log.info("\t\t├── Weighted by: '%s'", arguments.weighted_by_key)
    log.info("\t\t├── ArrayRecord key: '%s'", arguments.arrayrecord_key)
    log.info("\t\t└── ConfigRecord key: '%s'", arguments.configrecord_key)


def _by_cluster(report: events.Evaluated) -> dict[int, tuple[float, int]]:
    """Return the mean of the clients' scores and their number, by cluster."""
    scores: dict[int, list[float]] = {}
    for cluster, score, _ in report.per_client.values():
        scores.setdefault(cluster, []).append(score)
    return {k: (math.fsum(each) / len(each), len(each)) for k, each in scores.items()}


class _ToFlower(logging.Handler):
    """Hands Raceme's log lines on to Flower's logger."""

    def emit(self, record: logging.LogRecord) -> None:
        log.log(record.levelno, record.getMessage())


@contextmanager
def through_flower() -> Iterator[None]:
    """Let what Raceme logs be seen with Flower's lines, unless it is seen already."""
    logger = logging.getLogger("raceme")
    if logger.handlers:
        yield
        return
    handler, before = _ToFlower(), (logger.level, logger.propagate)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before
