"""What a user's ClientApp returns, as the loop reads it."""

from __future__ import annotations

from logging import getLogger

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from raceme.protocol import messages as names
from raceme.protocol.measure import ACCURACY, LOSS_MEASURE
from raceme.server.drop_in.arguments import FlowerArguments
from raceme.server.drop_in.metrics import (
    accuracy_name,
    examples_of,
    loss_name,
    train_loss_name,
    weight_of,
)
from raceme.server.drop_in.wire import Wire
from raceme.server.replies import InvalidReplyError

log = getLogger("flwr")


def read_training(
    content: RecordDict, arguments: FlowerArguments, wire: Wire, keeps_numbers: bool
) -> RecordDict:
    """Return a trained model with its number of examples, under the names that the loop knows.

    Parameters
    ----------
    content : RecordDict
        What the user's function has returned.
    arguments : FlowerArguments
        Say which metric is the weight.
    wire : Wire
        Translates the model.
    keeps_numbers : bool
        Whether a record of numbers beside the model is none of a model.

    Raises
    ------
    InvalidReplyError
        It is no single model with metrics and a weight above 0.
    InvalidModelError
        The model's arrays are not those that were sent.
    """
    models = {
        name: record
        for name, record in content.array_records.items()
        if not (keeps_numbers and name == names.NUMBERS)
    }
    if len(models) != 1:
        listed = f": {', '.join(sorted(models))}" if models else ""
        raise InvalidReplyError(
            f"it returns {len(models)} ArrayRecords{listed}; a model is exactly one, since updates "
            "are averaged and compared as a whole"
        )
    metrics = _metrics_of(content)
    weight = weight_of(metrics, arguments.weighted_by_key)
    if weight is None:
        stated = ", ".join(map(str, metrics)) or "none"
        raise InvalidReplyError(
            f"its MetricRecord has no number '{arguments.weighted_by_key}' (weighted_by_key); its "
            f"metrics: {stated}"
        )
    examples = examples_of(weight, arguments.weighted_by_key == names.NUM_EXAMPLES)
    if not examples:
        raise InvalidReplyError(
            f"its weight '{arguments.weighted_by_key}' is 0: it counts for nothing"
        )
    told = {name: value for name, value in metrics.items() if not isinstance(value, list)}
    told[names.NUM_EXAMPLES] = examples
    if names.TRAIN_LOSS not in told and (loss := train_loss_name(told)) is not None:
        told[names.TRAIN_LOSS] = told[loss]
    read = RecordDict(
        {
            names.ARRAYS: wire.received(next(iter(models.values()))),
            names.METRICS: MetricRecord(dict(told)),
        }
    )
    if keeps_numbers:
        if names.NUMBERS in content.array_records:
            read[names.NUMBERS] = content.array_records[names.NUMBERS]
        if names.CONFIG in content.config_records:
            read[names.CONFIG] = content.config_records[names.CONFIG]
    return read


def _metrics_of(content: RecordDict) -> MetricRecord:
    """Return the only MetricRecord of a reply."""
    count = len(content.metric_records)
    if count != 1:
        raise InvalidReplyError(f"it returns {count} MetricRecords, not 1")
    return next(iter(content.metric_records.values()))


class Scores:
    """Finds the accuracy and the loss among what clients measure in tests.

    Parameters
    ----------
    arguments : FlowerArguments
        May name the accuracy.

    Attributes
    ----------
    accuracy, loss : str or None
        Names of the metrics; found in the first test.
    """

    def __init__(self, arguments: FlowerArguments) -> None:
        self._named, self._weight = arguments.accuracy_key, arguments.weighted_by_key
        self.accuracy: str | None = None
        self.loss: str | None = None
        self._is_known = False

    def read(self, content: RecordDict) -> RecordDict:
        """Return a test under the names that the loop knows.

        Raises
        ------
        InvalidReplyError
            It has no single MetricRecord.
        """
        metrics = _metrics_of(content)
        if not self._is_known:
            self._find(metrics)
        told: dict[str, int | float] = {}
        settings = dict(content.config_records.get(names.CONFIG, {}))
        if names.UNIT in settings:
            # A regression, in the words of Raceme's own ClientApp.
            return content
        accuracy, loss = self._number(metrics, self.accuracy), self._number(metrics, self.loss)
        if accuracy is not None:
            told[ACCURACY.name] = accuracy
        elif self.accuracy is None and loss is not None:
            settings[names.UNIT] = LOSS_MEASURE.name
        if loss is not None:
            told[names.LOSS] = loss
        if (weight := weight_of(metrics, self._weight)) is not None:
            told[names.NUM_EXAMPLES] = examples_of(weight, self._weight == names.NUM_EXAMPLES)
        if (group := metrics.get(names.GROUP)) is not None and isinstance(group, int):
            told[names.GROUP] = group
        return RecordDict(
            {names.METRICS: MetricRecord(dict(told)), names.CONFIG: ConfigRecord(settings)}
        )

    def _number(self, metrics: MetricRecord, name: str | None) -> float | None:
        value = None if name is None else metrics.get(name)
        return float(value) if isinstance(value, int | float) else None

    def _find(self, metrics: MetricRecord) -> None:
        """Choose what is the accuracy and what is the loss, and say it."""
        self._is_known = True
        self.loss = loss_name(metrics)
        self.accuracy = accuracy_name(metrics)
        if self._named:
            if self._named not in metrics:
                log.warning(
                    "accuracy_key '%s' is not among the metrics of tests: %s",
                    self._named,
                    ", ".join(metrics),
                )
            else:
                self.accuracy = self._named
        if self.accuracy is not None:
            log.info("\t├── accuracy is '%s', loss is %s", self.accuracy, _quoted(self.loss))
        elif self.loss is not None:
            log.info(
                "\t├── no accuracy among %s: what is charted is the loss '%s' (accuracy_key= names "
                "another metric)",
                ", ".join(metrics),
                self.loss,
            )
        else:
            log.warning(
                "neither an accuracy nor a loss among %s: name one with accuracy_key=",
                ", ".join(metrics) or "no metrics",
            )


def _quoted(name: str | None) -> str:
    return "not stated" if name is None else f"'{name}'"
