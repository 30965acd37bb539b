"""Methods as replacements of Flower's strategies in a user's own Flower app.

Converts the loop's messages to those of Flower's own strategies, and replies with any names to
those that the loop reads.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid

from raceme.core import events
from raceme.core import messages as names
from raceme.core.clients import Client
from raceme.core.errors import UserError, check_known, plural, shown_by_flower
from raceme.core.evaluation import EvaluateFn, Packer, mean_metrics, tested_by_server
from raceme.core.events import ACCURACY, LOSS_MEASURE, change_line, is_news
from raceme.core.feature import Probe
from raceme.core.messages import InvalidModelError, Vector, from_array, to_array
from raceme.core.progress import Plan, Progress, StopCheck, never_stop, rounds_over
from raceme.core.requests import InvalidReplyError
from raceme.core.scheduling import FlowerArguments, InRounds, MetricsFn, sample
from raceme.core.timeline import Timeline, timeline_of
from raceme.flower.grid import GridWrapper
from raceme.flower.messages import array, array_record, refused, set_message_id

if TYPE_CHECKING:
    from raceme.core.strategy import Method, RunResult

log = logging.getLogger("flwr")

# -----------------------------------------------------------------------------
# Dtype adapter: conversion between a user's models and float32 models.
#
# Methods average and compare floating-point arrays. Other arrays, such as masks or tables of large
# integers, are hidden from methods and sent to clients unchanged.
# -----------------------------------------------------------------------------


_BFLOAT16 = "bfloat16"
_FLOATS = ("float", _BFLOAT16)
_EXACT = 2**24
"""Largest integer that is exact as float32."""
_MOST_NAMES = 3


class DtypeAdapter:
    """Converts between the records of a user's app and those of methods.

    Parameters
    ----------
    initial : ArrayRecord
        The user's initial model, with arrays of any dtype.

    Attributes
    ----------
    initial : ArrayRecord
        The part for methods, with bfloat16 widened to float32.
    carried : dict[str, Array]
        Arrays hidden from methods, sent to clients unchanged.

    Raises
    ------
    UserError
        The model has nothing to train.
    """

    def __init__(self, initial: ArrayRecord) -> None:
        self._names = list(initial)
        self.carried: dict[str, Array] = {}
        self._bfloat16: set[str] = set()
        for name, values in initial.items():
            if values.dtype == _BFLOAT16:
                self._bfloat16.add(name)
            elif not _is_computed(name, values):
                self.carried[name] = values
        self._is_plain = not (self.carried or self._bfloat16)
        self._last: tuple[ArrayRecord, ArrayRecord] | None = None
        if not any(
            values.dtype.startswith(_FLOATS) and name not in self.carried
            for name, values in initial.items()
        ):
            raise UserError(
                "initial_arrays holds no finite floating-point numbers, so that there is nothing "
                "to train: give its arrays, e.g. ArrayRecord(model.state_dict()). Trees cannot be "
                "averaged."
            )
        self.initial = self.received(initial)

    def sent(self, model: ArrayRecord) -> ArrayRecord:
        """Return a model for the user's app: all arrays, in the user's order."""
        if self._is_plain:
            return model
        # Cached, since one model goes to many clients.
        if self._last is None or self._last[0] is not model:
            whole = {
                name: self.carried[name] if name in self.carried else self._narrow(name, model)
                for name in self._names
            }
            self._last = model, array_record(whole)
        return self._last[1]

    def _narrow(self, name: str, model: ArrayRecord) -> Array:
        """Return an array of a model in the user's dtype."""
        if name not in self._bfloat16:
            return model[name]
        values = np.ascontiguousarray(from_array(model[name]), np.float32)
        bits = values.view(np.uint32)
        # Rounds to nearest, ties to even.
        half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        rounded = (bits + half) >> np.uint32(16)
        made = to_array(rounded.astype(np.uint16).view("V2").reshape(values.shape))
        return array(_BFLOAT16, made.shape, made.stype, made.data)

    def received(self, model: ArrayRecord) -> ArrayRecord:
        """Return the part of a user's model for methods.

        Raises
        ------
        InvalidModelError
            Its arrays have other names than the initial model's.
        """
        if model.keys() != set(self._names):
            raise InvalidModelError(self._difference(model))
        if self._is_plain:
            return model
        return array_record(
            {
                name: _widened(values) if name in self._bfloat16 else values
                for name, values in model.items()
                if name not in self.carried
            }
        )

    def _difference(self, model: ArrayRecord) -> str:
        """Describe the differences of a model's array names from the initial ones."""
        missing = _shortened_list([name for name in self._names if name not in model])
        strange = _shortened_list([name for name in model if name not in self._names])
        parts = [f"without {missing}"] if missing else []
        if strange:
            parts.append(f"with {strange}, which the initial model does not have")
        return f"it returns a model {' and '.join(parts)}"


def _is_computed(name: str, values: Array) -> bool:
    """Return whether methods compute with an array.

    Raises
    ------
    UserError
        It is unreadable.
    """
    try:
        numbers = from_array(values)
    except InvalidModelError as error:
        raise UserError(f"initial_arrays: '{name}' cannot be used: {error}.") from None
    if numbers.dtype.kind == "c" or not numbers.dtype.isnative:
        what = "complex" if numbers.dtype.kind == "c" else "of another byte order"
        raise UserError(
            f"initial_arrays: '{name}' is {what} ({numbers.dtype}): give real numbers of this "
            "machine, e.g. array.astype(np.float32)."
        )
    if numbers.dtype.kind == "f":
        return bool(np.isfinite(numbers).all())
    # A counter, e.g. of batch normalisation's batches.
    return numbers.dtype.kind in "iu" and bool((np.abs(numbers.astype(np.float64)) < _EXACT).all())


def _widened(values: Array) -> Array:
    """Return an array of bfloat16 as float32."""
    bits = from_array(values).view(np.uint16).astype(np.uint32) << np.uint32(16)
    return to_array(bits.view(np.float32))


def _shortened_list(names: list[str]) -> str:
    """Return the first names as text."""
    shown = ", ".join(f"'{name}'" for name in names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


# -----------------------------------------------------------------------------
# Metrics of users' ClientApps, with any names and weights.
# -----------------------------------------------------------------------------


Metrics = Mapping[str, object]

_ACCURACIES, _LOSSES = ("accuracy", "eval_acc"), ("loss", "eval_loss")
"""Usual names of metrics: those of Raceme's own ClientApp, and of Flower's templates."""
_TRAIN_LOSS = "train_loss"
_SCALE = 1_000_000
"""Number of examples that stands for a weight of 1, if weights are not numbers of examples."""


def named(metrics: Metrics, key: str, usual: tuple[str, ...]) -> str | None:
    """Return the name of a metric that is a number: that of a key, or without one a usual name."""
    wanted = (key,) if key else usual
    return next((name for name in wanted if isinstance(metrics.get(name), int | float)), None)


def examples_of(weight: float, are_examples: bool) -> int:
    """Return the number of examples of a client by its weight.

    Parameters
    ----------
    weight : float
        Stated weight: finite, at least 0.
    are_examples : bool
        Whether weights are numbers of examples. Others are relative, e.g. shares of 1, and keep six
        decimals.
    """
    scaled = weight if are_examples else weight * _SCALE
    return max(1, round(scaled)) if weight > 0 else 0


def mean_of_replies(contents: Sequence[RecordDict], weighted_by_key: str) -> MetricRecord:
    """Return the weighted mean of each metric common to all replies; see `mean_metrics`.

    Parameters
    ----------
    contents : Sequence[RecordDict]
        Replies, each with one MetricRecord.
    weighted_by_key : str
        Weight metric, left out of the result.
    """
    measured = []
    for content in contents:
        metrics = dict(next(iter(content.metric_records.values())))
        weight = weight_of(metrics, weighted_by_key)
        metrics.pop(weighted_by_key, None)
        measured.append((metrics, weight or 0.0))
    return mean_metrics(measured)


def weight_of(metrics: Metrics, weighted_by_key: str) -> float | None:
    """Return a client's stated weight; None if it is no number of at least 0."""
    stated = metrics.get(weighted_by_key)
    if not isinstance(stated, int | float):
        return None
    try:
        weight = float(stated)
    except OverflowError:
        return None
    return weight if math.isfinite(weight) and weight >= 0 else None


def shown(metrics: Metrics) -> str:
    """Format metrics: ``eval_loss 0.4123, eval_acc 0.8712``."""
    return ", ".join(f"{name} {_number(value)}" for name, value in metrics.items())


def _number(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_number(each) for each in value) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# -----------------------------------------------------------------------------
# Reply adapter: conversion of replies of a user's ClientApp.
# -----------------------------------------------------------------------------


class ReplyAdapter:
    """Converts replies of a user's functions to the loop's.

    Parameters
    ----------
    arguments : FlowerArguments
        Arguments with the names of the weight, accuracy and loss metrics.
    dtypes : DtypeAdapter
        Converts the models in replies.
    keeps_numbers : bool
        Whether a record with other arrays may come beside the model.

    Attributes
    ----------
    accuracy, loss : str or None
        Names of the test metrics, found in the first test.
    """

    def __init__(
        self, arguments: FlowerArguments, dtypes: DtypeAdapter, keeps_numbers: bool
    ) -> None:
        self._arguments, self._weight = arguments, arguments.weighted_by_key
        self._dtypes, self._keeps_numbers = dtypes, keeps_numbers
        self.accuracy: str | None = None
        self.loss: str | None = None
        self._is_known = False

    def training(self, content: RecordDict) -> RecordDict:
        """Return a trained model and its number of examples with the loop's names.

        Raises
        ------
        InvalidReplyError
            It is not a single model with metrics and a weight above 0.
        InvalidModelError
            The model's arrays differ from those sent.
        """
        models = dict(content.array_records)
        numbers = models.pop(names.NUMBERS, None) if self._keeps_numbers else None
        if len(models) != 1:
            listed = f": {', '.join(sorted(models))}" if models else ""
            raise InvalidReplyError(
                f"it returns {len(models)} ArrayRecords{listed}; a model is exactly one, since "
                "updates are averaged and compared as a whole"
            )
        metrics = _metrics_of(content)
        weight = weight_of(metrics, self._weight)
        if weight is None and self._weight in metrics:
            raise InvalidReplyError(
                f"its weight '{self._weight}' is {metrics[self._weight]!r}, not a finite number of "
                "at least 0"
            )
        if weight is None:
            stated = ", ".join(map(str, metrics)) or "none"
            raise InvalidReplyError(
                f"its MetricRecord has no number '{self._weight}' (weighted_by_key); its metrics: "
                f"{stated}"
            )
        if not weight:
            raise InvalidReplyError(
                f"its weight '{self._weight}' is 0: the update would have no effect"
            )
        renamed = {name: value for name, value in metrics.items() if not isinstance(value, list)}
        renamed[names.NUM_EXAMPLES] = self._examples(metrics, weight)
        usual = (names.TRAIN_LOSS, _TRAIN_LOSS, self._arguments.loss_key or _LOSSES[0])
        if (loss := named(renamed, "", usual)) is not None:
            renamed[names.TRAIN_LOSS] = renamed[loss]
        (model,) = models.values()
        arrays, read = self._dtypes.received(model), MetricRecord(dict(renamed))
        result = RecordDict({names.ARRAYS: arrays, names.METRICS: read})
        if numbers is not None:
            result[names.NUMBERS] = numbers
        if self._keeps_numbers and names.CONFIG in content.config_records:
            result[names.CONFIG] = content.config_records[names.CONFIG]
        return result

    def test(self, content: RecordDict) -> RecordDict:
        """Return a test with the loop's names.

        Raises
        ------
        InvalidReplyError
            It has no single MetricRecord.
        """
        metrics = _metrics_of(content)
        if not self._is_known:
            self._find(metrics)
        renamed: dict[str, int | float] = {}
        settings = dict(content.config_records.get(names.CONFIG, {}))
        if names.UNIT in settings:
            # A regression, as reported by Raceme's own ClientApp.
            return content
        accuracy = metrics.get(self.accuracy) if self.accuracy else None
        loss = metrics.get(self.loss) if self.loss else None
        if isinstance(accuracy, int | float):
            renamed[ACCURACY.name] = float(accuracy)
        if isinstance(loss, int | float):
            renamed[names.LOSS] = float(loss)
            if self.accuracy is None:
                settings[names.UNIT] = LOSS_MEASURE.name
        if (weight := weight_of(metrics, self._weight)) is not None:
            renamed[names.NUM_EXAMPLES] = self._examples(metrics, weight)
        if isinstance(group := metrics.get(names.GROUP), int):
            renamed[names.GROUP] = group
        read = MetricRecord(dict(renamed))
        return RecordDict({names.METRICS: read, names.CONFIG: ConfigRecord(settings)})

    def _examples(self, metrics: Metrics, weight: float) -> int:
        is_count = isinstance(metrics[self._weight], int)
        return examples_of(weight, is_count and self._weight == names.NUM_EXAMPLES)

    def _find(self, metrics: MetricRecord) -> None:
        """Choose the accuracy and loss metrics, and log them."""
        self._is_known, listed = True, ", ".join(metrics) or "no metrics"
        keys = self._arguments.accuracy_key, self._arguments.loss_key
        self.accuracy = named(metrics, keys[0], _ACCURACIES)
        self.loss = named(metrics, keys[1], _LOSSES)
        for name, key, found in (
            ("accuracy_key", keys[0], self.accuracy),
            ("loss_key", keys[1], self.loss),
        ):
            if key and found is None:
                log.warning("%s '%s' is not among the metrics of tests: %s", name, key, listed)
        if self.accuracy is not None:
            quoted = "not stated" if self.loss is None else f"'{self.loss}'"
            log.info("Accuracy is '%s', loss is %s", self.accuracy, quoted)
        elif self.loss is not None:
            log.info(
                "No accuracy among %s: the loss '%s' is charted (accuracy_key names another)",
                listed,
                self.loss,
            )
        else:
            log.warning(
                "Neither an accuracy nor a loss among %s: name them with accuracy_key and loss_key",
                listed,
            )


def _metrics_of(content: RecordDict) -> MetricRecord:
    """Return the only MetricRecord of a reply."""
    if (count := len(content.metric_records)) != 1:
        raise InvalidReplyError(f"it returns {count} MetricRecords, not 1")
    return next(iter(content.metric_records.values()))


# -----------------------------------------------------------------------------
# Names of clients without greetings: their node's until a reply states an id.
# -----------------------------------------------------------------------------


class ClientNames:
    """Names of clients: the loop's and the stated ones.

    The loop identifies a client by its node once connected. A stated id is used in reports; if it
    comes from another node later, the device has restarted and the client continues there.

    Attributes
    ----------
    stated : dict[str, str]
        Stated ids by loop name.
    mistaken : set[str]
        Names of nodes that are other clients.
    moved : set[int]
        Nodes to greet again under another name.
    """

    def __init__(self) -> None:
        self._of_node: dict[int, str] = {}
        self._by_id: dict[str, str] = {}
        self.stated: dict[str, str] = {}
        self.mistaken: set[str] = set()
        self.moved: set[int] = set()

    def of(self, node: int) -> str:
        """Return the name of the client on a node."""
        return self._of_node.setdefault(node, f"node-{node}")

    def identify(self, node: int, content: RecordDict, online: Callable[[], Iterable[int]]) -> str:
        """Record the id that a reply states, if any.

        Parameters
        ----------
        node : int
            Node of the reply.
        content : RecordDict
            Records of the reply, possibly with a ``client-id``.
        online : Callable
            Returns the connected nodes.

        Returns
        -------
        str
            Reason if the reply is unusable because its client changed, else empty.
        """
        said = (record.get(names.CLIENT_ID) for record in content.config_records.values())
        ids = (each for each in said if isinstance(each, str) and names.name_of(each))
        if (stated := next(ids, None)) is None:
            return ""
        own = self.of(node)
        known = self._by_id.setdefault(stated, own)
        if known == own:
            self.stated.setdefault(own, stated)
            return ""
        elsewhere = [n for n, name in self._of_node.items() if name == known and n != node]
        if not set(elsewhere).isdisjoint(online()):
            return f"it states the id '{stated}' of a client that is online elsewhere"
        for other in elsewhere:
            del self._of_node[other]
        self._of_node[node] = known
        self.mistaken.add(own)
        self.moved.add(node)
        return f"it is '{stated}', a known client: it continues as that"

    def shown(self, event: Any) -> Any:
        """Return a report with clients' stated names."""
        return self.renamed(event) if self.stated else event

    def renamed(self, value: Any) -> Any:
        """Replace the loop's names in a report or a part of it."""
        if isinstance(value, str):
            return self.stated.get(value, value)
        if isinstance(value, Mapping):
            return {self.renamed(key): self.renamed(each) for key, each in value.items()}
        if isinstance(value, tuple) and type(value) is tuple:
            return tuple(map(self.renamed, value))
        if is_dataclass(value) and not isinstance(value, type):
            parts = {item.name: getattr(value, item.name) for item in fields(value)}
            named = {
                k: self.renamed(part)
                for k, part in parts.items()
                if isinstance(part, str | Mapping)
            }
            return replace(value, **named)
        return value


# -----------------------------------------------------------------------------
# Flower-style rounds and metrics, also for methods without rounds.
# -----------------------------------------------------------------------------


_MOST_WEIGHTLESS = 8
"""Consecutive updates per client without a change of a model, from which on they count as rounds.

Larger than any method's number of probes; it makes every run end."""


class Rounds:
    """Counts the rounds of a run, and aggregates training and test metrics by round.

    Methods with rounds or windows count their own. For others, a round is as many updates as
    clients train at a time. Updates that change no model, such as probes, belong to the round of
    the next update that changes one, unless only such updates arrive.

    Parameters
    ----------
    method : Method
        The method whose rounds are counted.
    arguments : FlowerArguments
        Arguments with participation and aggregation of metrics.
    is_over : Callable
        Receives the number of each completed round and its metrics, if any.

    Attributes
    ----------
    over : int
        Number of rounds completed so far.
    tests : list[int]
        Rounds with completed or current tests.
    trained, tested : dict[int, MetricRecord]
        Aggregated client metrics by round.
    """

    def __init__(
        self,
        method: Method,
        arguments: FlowerArguments,
        is_over: Callable[[int, MetricRecord | None], None],
    ) -> None:
        self._method, self._arguments, self._is_over = method, arguments, is_over
        self._before = method.scheduling.rounds or 0
        # Updates that count, in total and at the end of the last round; others since the last one.
        self._counted = self._ended_at = self._weightless_in_a_row = 0
        self._end = 0
        # Replies that the loop is processing and may still refuse, by client.
        self._returned: dict[str, list[RecordDict]] = {}
        self._applied: list[RecordDict] = []
        self._weightless: list[RecordDict] = []
        self._answers: list[RecordDict] = []
        self._reported: set[str] = set()
        self.over = 0
        self.tests: list[int] = []
        self.trained: dict[int, MetricRecord] = {}
        self.tested: dict[int, MetricRecord] = {}

    # Numbers.

    @property
    def number(self) -> int:
        """Number of the current or last round; 0 before any update."""
        return self.over + (self._counted > self._ended_at)

    @property
    def last_test(self) -> int:
        """Number of the last tested round; 0 before the first test."""
        return self.tests[-1] if self.tests else 0

    def process_completed(self) -> None:
        """Process completed rounds."""
        own = self._method.scheduling.rounds
        if own is not None:
            while self.over < own - self._before:
                self._close(self._counted)
            return
        if self._counted == self._ended_at:
            # The size of the first round is known after the first answer.
            return
        self._end = self._end or self._ended_at + self._clients_at_once
        while self._counted >= self._end:
            self._close(self._end)
            self._end += self._clients_at_once

    @property
    def _clients_at_once(self) -> int:
        """Number of clients that train at a time."""
        return max(1, self._arguments.trained(len(self._method.progress.fleet.by_node)))

    def _close(self, updates: int) -> None:
        self.over += 1
        self._ended_at = updates
        function = self._arguments.train_metrics_aggr_fn
        # Replies of updates without weight, such as probes, count only if the round has no others.
        replies = self._applied or self._weightless
        self._is_over(self.over, self._aggregate(replies, function, self.trained, self.over))
        self._weightless.clear()

    # Metrics.

    def greeted(self, node: int) -> str | None:
        """Return the id that the client of a node has stated to its greeting, if any."""
        return self._method.progress.fleet.by_node.get(node)

    def returned(self, client: str, content: RecordDict) -> None:
        """Record a client's training reply."""
        kept = content
        if self._arguments.train_metrics_aggr_fn is None:
            # Without the model, to save memory during the round.
            kept = RecordDict(dict(content.metric_records))
        self._returned.setdefault(client, []).append(kept)

    def applied(self, client: str, counts: bool) -> None:
        """Record the use of a client's first reply, and whether its update has a weight."""
        self._weightless_in_a_row = 0 if counts else self._weightless_in_a_row + 1
        has_rounds = self._method.scheduling.rounds is not None
        is_idle = self._weightless_in_a_row > _MOST_WEIGHTLESS * self._clients_at_once
        self._counted += counts or has_rounds or is_idle
        if returned := self._returned.get(client):
            (self._applied if counts else self._weightless).append(returned.pop(0))

    def refused(self, client: str) -> None:
        """Drop a client's last reply."""
        if returned := self._returned.get(client):
            returned.pop()

    def answered(self, content: RecordDict) -> None:
        """Record a client's test."""
        self._answers.append(content)

    def close_test(self) -> MetricRecord | None:
        """Aggregate the metrics of the current test; None without any."""
        function = self._arguments.evaluate_metrics_aggr_fn
        return self._aggregate(self._answers, function, self.tested, self.last_test)

    def _aggregate(
        self,
        contents: list[RecordDict],
        function: MetricsFn | None,
        by_round: dict[int, MetricRecord],
        number: int,
    ) -> MetricRecord | None:
        """Aggregate replies by the user's function or their mean, and drop them."""
        replies = [content for content in contents if len(content.metric_records) == 1]
        contents.clear()
        if not replies:
            return None
        made = (function or mean_of_replies)(replies, self._arguments.weighted_by_key)
        if function is None and made is not None:
            self._report_left_out(replies, made)
        if made is not None:
            by_round[number] = made
        return made

    def _report_left_out(self, replies: list[RecordDict], made: MetricRecord) -> None:
        """Log metrics that have no mean, once."""
        names_ = {name for reply in replies for name in next(iter(reply.metric_records.values()))}
        left_out = names_ - {*made, self._arguments.weighted_by_key} - self._reported
        self._reported |= left_out
        if left_out:
            log.warning(
                "No mean of these metrics, as some clients report none or lists of other lengths: "
                "%s",
                ", ".join(sorted(left_out)),
            )


# -----------------------------------------------------------------------------
# A grid between the loop and unmodified ClientApps.
# -----------------------------------------------------------------------------


_NOT_REGISTERED = "function registered"
"""Flower's error for a ClientApp without a function for a message type."""


class FlowerGrid(GridWrapper):
    """Exchanges Flower-style messages with ClientApps on any grid.

    Parameters
    ----------
    grid : Grid
        Grid of the ClientApps: Flower's or a virtual one.
    arguments : FlowerArguments
        Names of records and of the weight.
    dtypes : DtypeAdapter
        Adapts models to the dtypes of the user's app, and back.
    rounds : Rounds
        Rounds, which number messages and receive metrics.
    on_examples : Callable
        Receives a client's number of examples with each reply.
    greets : bool
        Whether clients are greeted because their ClientApp supports Raceme's kinds of work.
    """

    keeps_messages = False
    """Such runs cannot be resumed."""

    def __init__(
        self,
        grid: Grid,
        clock: Timeline,
        arguments: FlowerArguments,
        dtypes: DtypeAdapter,
        rounds: Rounds,
        *,
        greets: bool,
        on_examples: Callable[[str, int], None],
    ) -> None:
        self._grid, self._clock, self._arguments = grid, clock, arguments
        self._dtypes, self._rounds, self._greets = dtypes, rounds, greets
        self._on_examples = on_examples
        self._replies = ReplyAdapter(arguments, dtypes, keeps_numbers=greets)
        self.is_virtual, self.free_evaluation = clock.is_virtual, clock.free_evaluation
        self.client_names = ClientNames()
        self.tests = True
        self._answers: dict[str, Message] = {}
        self._sent_to: dict[str, str] = {}
        self._failed_tests: set[int] = set()
        self._count = 0

    # A clock.

    def now(self) -> float:
        """Return the time in seconds."""
        return self._clock.now()

    def wait(self, message_ids: Collection[str], until: float | None = None) -> list[Message]:
        """Wait for the next replies, those to greetings first."""
        return self._greeting_answers(message_ids) or self._received(
            self._clock.wait(message_ids, until)
        )

    def forget(self, message_ids: Iterable[str]) -> None:
        """Give up on replies."""
        given_up = list(message_ids)
        for key in given_up:
            self._sent_to.pop(key, None)
        self._clock.forget(given_up)

    # A grid.

    def get_node_ids(self) -> Iterable[int]:
        """Return the connected nodes.

        A node that turned out to be another client is left out once, so that it is greeted again.
        """
        online = list(self._grid.get_node_ids())
        moved, self.client_names.moved = self.client_names.moved, set()
        return [node for node in online if node not in moved]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages like Flower's own strategies; greetings are answered here."""
        pushed: list[str] = []
        for message in messages:
            is_greeting = message.metadata.message_type == MessageType.QUERY and not message.content
            if is_greeting and not self._greets:
                pushed.append(self._greeting_answer(message))
                continue
            sent = self._grid.push_messages([message if is_greeting else self._to_flower(message)])
            for key in sent:
                pushed.append(key)
                if not is_greeting:
                    self._sent_to[key] = self.client_names.of(message.metadata.dst_node_id)
        return pushed

    def _pull(self, message_ids: Collection[str]) -> Iterable[Message]:
        """Return the replies present."""
        return self._greeting_answers(message_ids) + self._received(
            self._grid.pull_messages(message_ids)
        )

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and wait for their replies."""
        translated = [self._to_flower(message) for message in messages]
        return self._received(self._grid.send_and_receive(translated, timeout=timeout))

    # Outgoing messages.

    def _greeting_answer(self, greeting: Message) -> str:
        """Answer a greeting on behalf of a client."""
        self._count += 1
        key = f"greeting-{self._count}"
        set_message_id(greeting, key)
        client = self.client_names.of(greeting.metadata.dst_node_id)
        identity = ConfigRecord({names.CLIENT_ID: client})
        self._answers[key] = Message(RecordDict({names.CONFIG: identity}), reply_to=greeting)
        return key

    def _to_flower(self, message: Message) -> Message:
        """Convert a message to that of Flower's own strategies."""
        content = RecordDict()
        settings: dict[str, Any] = {}
        for name, record in message.content.items():
            if isinstance(record, ConfigRecord):
                settings = dict(record)
            elif name == names.ARRAYS and isinstance(record, ArrayRecord):
                content[self._arguments.arrayrecord_key] = self._dtypes.sent(record)
            elif self._greets:
                content[name] = record
        if not self._greets:
            settings.pop(names.TASK, None)
            settings.pop(names.VERSION, None)
        is_test = names.category(message) == MessageType.EVALUATE
        number = self._rounds.last_test if is_test else self._rounds.over + 1
        settings.setdefault(names.ROUND, number)
        content[self._arguments.configrecord_key] = ConfigRecord(settings)
        message.content = content
        return message

    # Incoming replies.

    def _greeting_answers(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the answers to greetings, which this grid makes itself."""
        return [self._answers.pop(key) for key in message_ids if key in self._answers]

    def _received(self, replies: Iterable[Message]) -> list[Message]:
        return [self._read(reply) for reply in replies]

    def _read(self, reply: Message) -> Message:
        """Convert a reply for the loop; unusable ones become errors."""
        metadata = reply.metadata
        client = self._sent_to.pop(metadata.reply_to_message_id, None)
        category = names.category(reply)
        if reply.has_error():
            self._check_error(reply, category)
            if category == MessageType.EVALUATE and self.tests:
                self._log_failed_test(metadata.src_node_id, names.error_line(reply))
            return reply
        content = reply.content
        try:
            if not self._greets:
                self._check_identity(metadata.src_node_id, client, content)
            if category == MessageType.EVALUATE:
                self._rounds.answered(content)
                reply.content = self._replies.test(content)
            # Apps with Raceme's kinds of work may answer training without a model.
            elif category == MessageType.TRAIN and (
                not self._greets or content.array_records.keys() - {names.NUMBERS}
            ):
                read = self._replies.training(content)
                greeted = self._rounds.greeted(metadata.src_node_id) if self._greets else None
                name = greeted or client or self.client_names.of(metadata.src_node_id)
                self._rounds.returned(name, content)
                if not self._greets:
                    metrics = read.metric_records[names.METRICS]
                    self._on_examples(name, int(metrics[names.NUM_EXAMPLES]))  # type: ignore[arg-type]
                reply.content = read
        except InvalidReplyError as error:
            if category == MessageType.EVALUATE:
                self._log_failed_test(metadata.src_node_id, str(error))
            return refused(reply, str(error))
        return reply

    def _log_failed_test(self, node: int, reason: str) -> None:
        """Log the first failed test of a node: it counts for no accuracy."""
        if node not in self._failed_tests:
            self._failed_tests.add(node)
            log.warning("The evaluation of %s failed: %s", self.client_names.of(node), reason)

    def _check_identity(self, node: int, client: str | None, content: RecordDict) -> None:
        """Raise InvalidReplyError if a reply comes from another client than the queried one."""
        if client is not None and client != self.client_names.of(node):
            raise InvalidReplyError("its node turned out to be that of another client")
        if reason := self.client_names.identify(node, content, self._grid.get_node_ids):
            raise InvalidReplyError(reason)

    def _check_error(self, reply: Message, category: str) -> None:
        """Detect a user's ClientApp without a function for a message type.

        Raises
        ------
        UserError
            It has no function for training.
        """
        if f"No {category} {_NOT_REGISTERED}" not in (reply.error.reason or ""):
            return
        if category == MessageType.TRAIN:
            raise UserError(
                "The ClientApp cannot train: write a function and register it with @app.train()."
            )
        if self.tests:
            log.warning(
                "The ClientApp has no function for evaluation, @app.evaluate(): clients do not "
                "test models"
            )
        self.tests = False


# -----------------------------------------------------------------------------
# Flower-style log of a run's progress, to Flower's logger.
# -----------------------------------------------------------------------------


_MEGABYTE = 1024**2
_MOST_CLUSTERS = 8
"""Maximum number of clusters in a line."""


class FlowerLog(events.EventHandler):
    """Logs the progress of a run.

    Parameters
    ----------
    length : str
        Length of the run in log headings: ``"/3"`` rounds, or empty.
    is_virtual : bool
        Whether times are virtual, which the log states.
    """

    def __init__(self, length: str, is_virtual: bool) -> None:
        self._length, self._clock = length, "virtual s" if is_virtual else "s"
        self._updates: list[events.UpdateApplied] = []
        self._rejected = 0
        self._began = 0.0
        self.time = 0.0

    def __call__(self, event: events.Event) -> None:
        """Process an event; log changes of clusters."""
        self.time = event.time
        super().__call__(event)

    def on_update_applied(self, event: events.UpdateApplied) -> None:
        """Count the event in its round."""
        self._updates.append(event)

    def on_update_rejected(self, event: events.UpdateRejected) -> None:
        """Count the event in its round."""
        self._rejected += 1

    def on_clusters_changed(self, event: events.ClustersChanged) -> None:
        """Log splits, merges and new clusters."""
        if is_news(event):
            line = change_line(event)
            _log(f"{line[0].upper()}{line[1:]}")

    def round_over(self, number: int, metrics: MetricRecord | None) -> None:
        """Log a round of updates."""
        updates = self._updates
        staleness = [update.staleness for update in updates]
        parts = [
            f"{len(updates)} update{'' if len(updates) == 1 else 's'} of "
            f"{len({update.client for update in updates})} clients in "
            f"{self.time - self._began:.1f} {self._clock}"
        ]
        if idle := sum(not update.weight for update in updates):
            parts.append(f"{idle} of them changed no model")
        if any(staleness):
            mean = sum(staleness) / len(staleness)
            parts.append(f"staleness {mean:.1f} on average, {max(staleness)} at most")
        if self._rejected:
            parts.append(f"{plural(self._rejected, 'reply', 'replies')} not used")
        if metrics:
            parts.append(shown(metrics))
        _log(f"Round {number}{self._length}: {', '.join(parts)}")
        self._updates, self._rejected, self._began = [], 0, self.time

    def tested(
        self, number: int, report: events.Evaluated | None, metrics: MetricRecord | None
    ) -> None:
        """Log clients' tests of a round's models, by cluster.

        Without a report there is neither accuracy nor loss.
        """
        if report is None:
            if metrics is not None:
                _log(f"Round {number}{self._length} tested: {shown(metrics)}")
            return
        found = shown(metrics or {report.measure.name: report.accuracy})
        of = f"{report.answered} of {report.asked} clients"
        _log(f"Round {number}{self._length} tested by {of}: {found}")
        scores = report.by_cluster
        if len(scores) > 1:
            listed = [
                f"{cluster}: {report.measure.shown(fmean(each))} ({len(each)})"
                for cluster, each in sorted(scores.items())
            ]
            _log(f"{report.measure.word} by cluster (clients): {_first(listed)}")

    def tested_centrally(
        self, number: int, mean: MetricRecord, clusters: Mapping[int, MetricRecord]
    ) -> None:
        """Log the server's own test of each cluster's model."""
        of = f"Round {number}{self._length}" if number else "The initial model"
        _log(f"{of} tested on the server: {shown(mean)}")
        if len(clusters) > 1:
            listed = [f"{cluster}: {shown(own)}" for cluster, own in sorted(clusters.items())]
            _log(f"by cluster: {_first(listed, '; ')}")

    def ended(self, result: RunResult, seconds: float) -> None:
        """Log the end of a run, and its result."""
        _log(f"Finished after {seconds:.1f} {self._clock}", *str(result).splitlines())


def _first(listed: list[str], separator: str = ", ") -> str:
    """Return the first entries of a list by cluster, and how many more there are."""
    more = f" and {len(listed) - _MOST_CLUSTERS} more" if len(listed) > _MOST_CLUSTERS else ""
    return separator.join(listed[:_MOST_CLUSTERS]) + more


def _log(*lines: str) -> None:
    for line in lines:
        log.info("%s", line)


class _ToFlower(logging.Handler):
    """Passes Raceme's log lines to Flower's logger."""

    def emit(self, record: logging.LogRecord) -> None:
        log.log(record.levelno, record.getMessage())


@contextmanager
def through_flower() -> Iterator[None]:
    """Show Raceme's log lines with Flower's, unless shown already."""
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


# -----------------------------------------------------------------------------
# Methods as replacements of Flower's strategies in a user's own Flower app.
# -----------------------------------------------------------------------------


_LOOK_SECONDS = 1.0
"""Interval of checks of connected nodes before a run."""
_ASKING_SECONDS = 60.0
"""Time limit for the first client's answer about its ClientApp."""
_FEWEST_USELESS, _USELESS_EACH = 12, 3
"""Unusable replies, in total and per client, after which the ClientApp is considered unsuitable."""
SNIPPET = """
    from raceme.client_app import AddedKinds, OwnData

    def load(context):
        x_train, y_train, x_test, y_test = ...  # this client's samples, as arrays
        return OwnData(Net(), x_train, y_train, x_test, y_test)

    kinds = AddedKinds(load)
    app = ClientApp(mods=[kinds])
    app.query()(kinds.answer)
"""
"""Code that a user adds to a ClientApp."""


@dataclass(frozen=True, kw_only=True)
class FlowerRun:
    """Arguments of `start` of Flower's strategies, and additions.

    Attributes
    ----------
    grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
        As for Flower's own strategies.
    should_stop : Callable, optional
        As in Flower 1.43: called after each round, with its number and the result so far.
    max_updates : int or None
        Updates after which the run ends, instead of rounds.
    max_time : float or None
        Time limit in seconds.
    greet : bool
        Whether clients are greeted, as Raceme's own ClientApp expects.
    """

    grid: Grid
    initial_arrays: ArrayRecord
    num_rounds: int = 3
    timeout: float = 3600.0
    train_config: ConfigRecord = field(default_factory=ConfigRecord)
    evaluate_config: ConfigRecord = field(default_factory=ConfigRecord)
    evaluate_fn: EvaluateFn | None = None
    should_stop: Callable[[int, RunResult], bool] | None = None
    max_updates: int | None = None
    max_time: float | None = None
    greet: bool = False
    observe: events.Observer = events.ignore
    stop_check: StopCheck = never_stop
    probe: Probe | None = None
    starts: Sequence[Vector] = ()

    def check(self) -> None:
        """Raise UserError if the run cannot start or would never end."""
        if not isinstance(self.initial_arrays, ArrayRecord) or not self.initial_arrays:
            raise UserError(
                "initial_arrays must be an ArrayRecord with the model's arrays, e.g. "
                "ArrayRecord(model.state_dict()): they define the model."
            )
        name = "max_updates" if self.max_updates is not None else "num_rounds"
        count = getattr(self, name)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UserError(f"{name} must be a whole number of at least 1, got {count!r}.")
        if not isinstance(self.timeout, int | float) or not self.timeout > 0:
            raise UserError(f"timeout must be seconds above 0, got {self.timeout!r}.")

    @property
    def length(self) -> str:
        """Length of the run in words."""
        if self.max_updates is not None:
            return f"Number of updates: {self.max_updates}"
        return f"Number of rounds: {self.num_rounds}"


@shown_by_flower()
def start(method: Method, **arguments: Any) -> RunResult:
    """Run a method with unmodified ClientApps.

    Parameters
    ----------
    **arguments
        The fields of a `FlowerRun`.

    Raises
    ------
    UserError
        There is no such argument, the run cannot start, the ClientApp does not support the method,
        or no client returned a usable reply.
    """
    known = [item.name for item in fields(FlowerRun)]
    for name in arguments:
        check_known("argument of start()", name, known)
    flower_run = FlowerRun(**arguments)
    flower_run.check()
    with through_flower():
        run = _Run(method, flower_run)
        result = run.result(run.prepare())
    run.log_end(result)
    return result


@dataclass(frozen=True, eq=False, kw_only=True)
class FlowerPlan(Plan):
    """A plan in rounds: end, tests, and their clients.

    Attributes
    ----------
    run : _Run
        Its run.
    """

    run: _Run

    def places(self, online: int) -> int | None:
        """Return the number of clients that train at a time; None for all."""
        taking_part = self.run.arguments.trained(online)
        has_rounds = self.run.method.scheduling.rounds is not None
        return None if has_rounds or taking_part >= online else taking_part

    def limit(self, updates: int, num_updates: int, now: float, rounds: int | None = None) -> str:
        """Return the reached limit in words."""
        over = self.run.process_completed()
        if self.run.options.max_updates is None and over >= self.run.options.num_rounds:
            return rounds_over(self.run.options.num_rounds)
        if self.run.stopped_after:
            return f"should_stop ended the run after round {self.run.stopped_after}"
        return super().limit(updates, num_updates, now, rounds)

    def is_tested(self, progress: Progress, rounds: int | None) -> bool:
        """Return whether the next evaluation is due: after each round that changed a model."""
        counted = self.run.rounds
        counted.process_completed()
        return progress.updates > progress.evaluated_at and counted.over > counted.last_test

    def testers(self, online: Sequence[Client]) -> Sequence[Client]:
        """Return the clients that test models; as in Flower, none before the first round."""
        rounds = self.run.rounds
        number = rounds.over
        if not number or number in rounds.tests:
            # Before the first round, or after the last complete one at the end.
            number = rounds.number
        self.run.begin_test(number)
        count = self.run.arguments.tested(len(online)) if number and self.run.grid.tests else 0
        return sample(online, count, self.run.rng) if count else []


class _Run(events.EventHandler):
    """The parts of a run and their connections."""

    def __init__(self, method: Method, options: FlowerRun) -> None:
        self.method, self._name = method, type(method).__name__
        self.arguments, self.options = method.arguments, options
        self._clock = timeline_of(options.grid)
        self._began = self._clock.now()
        self._dtypes = DtypeAdapter(options.initial_arrays)
        length = f"/{options.num_rounds}" if options.max_updates is None else ""
        self.log = FlowerLog(length, self._clock.is_virtual)
        self.rounds = Rounds(method, self.arguments, self.log.round_over)
        self.grid = FlowerGrid(
            options.grid,
            self._clock,
            self.arguments,
            self._dtypes,
            self.rounds,
            greets=options.greet or bool(method.needs.kinds),
            on_examples=self._record_examples,
        )
        self.rng = method.rng.spawn(1)[0]
        # Last round tested by the server.
        self._tested = -1
        self._useless, self._refused = 0, ""
        # Last round for which the user's stop function was called, and the round after which to
        # stop.
        self._asked = self.stopped_after = 0

    def prepare(self) -> int:
        """Log the start, wait for enough nodes, and return their number.

        Raises
        ------
        UserError
            The run cannot start.
        """
        method = self.method
        self._check_server()
        self._log_start()
        if carried := ", ".join(self._dtypes.carried):
            _log(f"Sent unchanged, since these arrays cannot be averaged: {carried}")
        online = self._wait_for_nodes()
        if self._clock.is_virtual:
            method.check(online)
        if method.needs.kinds:
            self._check_kinds()
        return online

    def result(self, online: int) -> RunResult:
        """Run; return the result by rounds, with the user's models and clients' own names."""
        options, method, dtypes = self.options, self.method, self._dtypes
        if isinstance(method.scheduling, InRounds):
            method.scheduling.least = self.arguments.min_train_nodes
        before = method.progress.updates
        limit = 0 if options.max_updates is None else before + options.max_updates
        planned = limit or before + options.num_rounds * self.arguments.trained(online)
        result = method.run(
            self.grid,
            dtypes.initial,
            max_updates=limit,
            timeout=options.timeout,
            train_config=ConfigRecord(dict(options.train_config)),
            evaluate_config=ConfigRecord(dict(options.evaluate_config)),
            plan=FlowerPlan(max_time=options.max_time or 0.0, planned_updates=planned, run=self),
            observe=self,
            stop_check=options.stop_check,
            probe=options.probe,
            starts=options.starts,
        )
        self._check_useless(fewest=1)
        self._close_test(None)
        self._test_centrally(self.rounds.number)
        result.train_metrics_clientapp = self.rounds.trained
        result.evaluate_metrics_clientapp = self.rounds.tested
        result.clusters = {k: dtypes.sent(model) for k, model in result.clusters.items()}
        result.arrays = dtypes.sent(result.arrays) if result.arrays else options.initial_arrays
        clients = self.grid.client_names
        result.client_clusters = {
            clients.renamed(client): weights
            for client, weights in result.client_clusters.items()
            if client not in clients.mistaken
        }
        return result

    # Start.

    def _check_server(self) -> None:
        """Raise UserError if the method needs samples of the server."""
        probe, starts = self.options.probe, self.options.starts
        try:
            self.method.check_server(0 if probe is None else probe.sets, bool(starts))
        except UserError as error:
            if probe is not None or starts:
                raise
            raise UserError(
                f"{self._name} measures models on the server's own samples: give its "
                "start(probe=...) a raceme.core.strategy.Probe. In `raceme run` it is an option: "
                f"{error}"
            ) from None

    def _log_start(self) -> None:
        """Log the settings of the run."""
        arguments, options = self.arguments, self.options
        size = sum(len(values.data) for values in options.initial_arrays.values()) / _MEGABYTE
        _log(f"Starting {self._name}: {options.length}, a model of {size:.2f} MB")
        for what, config in (
            ("train", options.train_config),
            ("evaluate", options.evaluate_config),
        ):
            values = {key: "<bytes>" if isinstance(v, bytes) else v for key, v in config.items()}
            if values:
                _log(f"{what}_config: {values}")
        used = {
            item.name: getattr(arguments, item.name)
            for item in fields(arguments)
            if getattr(arguments, item.name) != item.default
        }
        _log(*(f"{name}: {getattr(value, '__name__', value)}" for name, value in used.items()))

    def log_end(self, result: RunResult) -> None:
        """Log the end of the run, on the clock of its grid."""
        self.log.ended(result, self._clock.now() - self._began)

    def _check_kinds(self) -> None:
        """Greet one client before all others, to check its ClientApp.

        Without an answer the run starts anyway.

        Raises
        ------
        UserError
            The ClientApp has no function for queries, and thus for the method's kinds of work.
        """
        grid, clock, needs = self.options.grid, self._clock, self.method.needs.kinds
        patience = min(_ASKING_SECONDS, self.options.timeout)
        node = next(iter(grid.get_node_ids()))
        greeting = Message(RecordDict(), node, MessageType.QUERY, ttl=patience)
        asked, until = list(grid.push_messages([greeting])), clock.now() + patience
        replies: list[Message] = []
        while not replies and clock.now() < until:
            replies = clock.wait(asked, until)
        error = replies[0].error if replies and replies[0].has_error() else None
        if error is not None and _NOT_REGISTERED in (error.reason or ""):
            listed = " and ".join(f"'{kind}'" for kind in sorted(needs))
            kinds = "a kind" if len(needs) == 1 else "kinds"
            raise UserError(
                f"{self._name} asks clients for more than to train and to test a model: {listed}. "
                f"This ClientApp has no function for such {kinds} of work. Take a method that "
                "needs none, such as CASA (docs/flower-users.md lists them), or add to the "
                "ClientApp:",
                SNIPPET,
            )

    def _wait_for_nodes(self) -> int:
        """Wait until enough nodes are connected; return their number.

        Raises
        ------
        UserError
            On virtual time, they will not connect.
        """
        clock, timeout = self._clock, self.options.timeout
        wanted, last, began = max(1, self.arguments.min_available_nodes), -1, clock.now()
        while (online := len(list(self.options.grid.get_node_ids()))) < wanted:
            if online != last:
                _log(
                    f"Waiting for nodes to connect: {online} connected (minimum required: "
                    f"{wanted})."
                )
                last = online
            if clock.is_virtual and clock.now() >= began + timeout:
                raise UserError(
                    f"Only {online} of min_available_nodes={wanted} nodes connected within "
                    f"{timeout:g} virtual seconds: simulate more, or require fewer."
                )
            clock.wait((), clock.now() + _LOOK_SECONDS)
        return online

    # Reports of clients and the loop.

    def _record_examples(self, name: str, examples: int) -> None:
        """Record a client's number of examples, which is unknown if there was no greeting."""
        client = self.method.progress.fleet.clients.get(name)
        if client is not None and client.num_examples != examples:
            client.num_examples = examples

    def __call__(self, event: events.Event) -> None:
        """Process an event, and pass it on with clients' own names."""
        super().__call__(event)
        shown = self.grid.client_names.shown(event)
        self.log(shown)
        self.options.observe(shown)

    def on_update_applied(self, event: events.UpdateApplied) -> None:
        """Count the event in its round."""
        self.rounds.applied(event.client, counts=event.weight > 0)
        self._useless = -1

    def on_evaluated(self, event: events.Evaluated) -> None:
        """Log it with clients' further metrics."""
        self._close_test(event)

    def on_update_rejected(self, event: events.UpdateRejected) -> None:
        """Raise UserError if no client can return a usable reply."""
        self.rounds.refused(event.client)
        if self._useless < 0:
            return
        self._useless += 1
        self._refused = f"{event.client}: {event.reason}"
        clients = len(self.method.progress.fleet.clients)
        self._check_useless(max(_FEWEST_USELESS, _USELESS_EACH * clients))

    def _check_useless(self, fewest: int) -> None:
        """Raise UserError after that many unusable replies without a usable one."""
        if self._useless >= fewest:
            # ``from None``: the refusal of the last reply, which may be in progress, is not the
            # cause.
            raise UserError(
                f"None of {plural(self._useless, 'reply', 'replies')} could be used; the last one, "
                f"of {self._refused}"
            ) from None

    # Rounds and tests.

    def process_completed(self) -> int:
        """Process completed rounds with tests on the server; return their number."""
        self.rounds.process_completed()
        self._test_centrally(self.rounds.over)
        return self.rounds.over

    def begin_test(self, number: int) -> None:
        """Start to collect tests of a round's models."""
        self._close_test(None)
        self.rounds.tests.append(number)

    def _close_test(self, report: events.Evaluated | None) -> None:
        """Aggregate and log the current test; without a report it has no score."""
        number = self.rounds.last_test
        self.log.tested(number, report, self.rounds.close_test())
        self._ask_to_stop(number)

    def _ask_to_stop(self, number: int) -> None:
        """Call the user's stop function after a round whose models are tested."""
        should_stop = self.options.should_stop
        if should_stop is None or number <= self._asked or self.stopped_after:
            return
        self._asked = number
        method = self.method
        result = replace(
            method.result,
            arrays=self._dtypes.sent(
                method.spec.pack(method.models[method.clusters.largest()].vector)
            ),
            train_metrics_clientapp=self.rounds.trained,
            evaluate_metrics_clientapp=self.rounds.tested,
        )
        if should_stop(number, result):
            self.stopped_after = number

    def _test_centrally(self, number: int) -> None:
        """Test a round's models by the user's function, once; round 0 at the start."""
        test = self.options.evaluate_fn
        if test is None or number <= self._tested:
            return
        self._tested = number
        if self.method.models:
            packer = Packer(self.method.spec)
            mean, clusters = tested_by_server(
                self.method, packer, lambda arrays: test(number, self._dtypes.sent(arrays))
            )
        else:
            # Methods whose clusters start from their clients' models.
            mean, clusters = test(number, self.options.initial_arrays), {}
        if mean is not None:
            result = self.method.result
            result.evaluate_metrics_serverapp[number] = mean
            result.evaluate_metrics_clusters[number] = clusters
            self.log.tested_centrally(number, mean, clusters)
