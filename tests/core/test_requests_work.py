"""Requests of every kind through the loop: messages, replies and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fleets import MODEL, Change, grid_of, pulled_app, read, write
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from log_lines import lines_with
from runs import ONES, devices, of, run

from raceme.core import events
from raceme.core.clients import Client
from raceme.core.clusters import Clusters, Model
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.messages import LABEL_COUNTS, LOSSES, TRAIN, Vector
from raceme.core.requests import Answer, Request, Update
from raceme.core.scheduling import InRounds, Scheduler
from raceme.core.strategy import Needs
from raceme.runs import experiment
from raceme.strategies import FedAsync, FedAsyncParameters, Method
from raceme.training import models


class Asking(FedAsync):
    """FedAsync with two models that queries clients for label counts, then for losses."""

    def __init__(self, kinds: tuple[str, ...] = (LABEL_COUNTS, LOSSES)) -> None:
        super().__init__(FedAsyncParameters(alpha=0.5, decay="constant"))
        self.kinds = kinds
        self.answers: dict[str, list[Answer]] = {}

    def initialize(self, vector: Vector) -> None:
        self.clusters = Clusters({0: Model(vector), 1: Model(vector + 1)})
        self.state = self.state_type()

    def request_for(self, client: str) -> Request:
        answered = len(self.answers.get(client, []))
        if answered == len(self.kinds):
            return Request(client, models=(0,))
        kind = self.kinds[answered]
        models = () if kind == LABEL_COUNTS else (1, 0)
        return Request(client, kind, models=models, settings={"on": "test"})

    def on_answer(self, answer: Answer) -> None:
        self.answers.setdefault(answer.task.client, []).append(answer)


def asked_app(seen: list[dict[str, Any]], change: Change | None = None) -> ClientApp:
    """An app that answers queries for label counts and losses, and notes its messages."""
    base, app = pulled_app(), ClientApp()

    def reply(message: Message, context: Context, **numbers: np.ndarray) -> Message:
        content = message.content
        seen.append({**content["config"], "models": sorted(content.array_records)})
        echo = {k: v for k, v in content["config"].items() if k in ("task", "version", "kind")}
        records = {
            "metrics": MetricRecord({"num-examples": 10}),
            "numbers": ArrayRecord({name: Array(values) for name, values in numbers.items()}),
            "config": ConfigRecord(echo),
        }
        made = Message(RecordDict(records), reply_to=message)
        return change(made, int(context.node_config["partition-id"])) if change else made

    @app.query()
    def query(message: Message, context: Context) -> Message:
        if "config" not in message.content:
            return base(message, context)
        return reply(message, context, **{LABEL_COUNTS: np.array([7, 0, 3])})

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if "kind" not in message.content["config"]:
            seen.append({"models": sorted(message.content.array_records)})
            return base(message, context)
        sent = [read(message.content[f"arrays-{index}"]) for index in (0, 1)]
        losses = np.array([[model[0], model[0] + 5.0] for model in sent], np.float32)
        return reply(message, context, losses=losses)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return base(message, context)

    return app


def test_answers_of_every_kind_reach_the_method() -> None:
    sent: list[dict[str, Any]] = []
    strategy = Asking()
    seen = run(strategy, grid_of(asked_app(sent), devices(2.0)), num_rounds=1)
    assert [one["models"] for one in sent] == [[], ["arrays-0", "arrays-1"], ["arrays"]]
    assert [(one["kind"], one["on"]) for one in sent[:2]] == [
        ("label-counts", "test"),
        ("losses", "test"),
    ]
    counts, losses = strategy.answers["c0"]
    assert counts.numbers["label-counts"].tolist() == [7, 0, 3]
    assert (counts.num_examples, counts.task.kind, counts.task.candidates) == (
        10,
        "label-counts",
        {},
    )
    # The models are in the order of the request: cluster 1 holds ones, cluster 0 zeros.
    assert losses.numbers["losses"].tolist() == [[1.0, 6.0], [0.0, 5.0]]
    assert losses.task.candidates == {1: 0, 0: 0}
    # A query takes no time, measuring losses does; neither is an update.
    (update,) = of(events.UpdateApplied, seen)
    assert (update.dispatched_at, update.time) == (2.0, 4.0)
    assert losses.task.bytes_down == 2 * counts.task.bytes_down + 2 * MODEL.count_bytes()
    assert losses.bytes_up > 0
    assert not of(events.UpdateRejected, seen)
    assert strategy.progress.in_flight == {}
    # Both are reported with their bytes; the default phase is the kind of work.
    taken = of(events.AnswerTaken, seen)
    assert [(e.time, e.client, e.kind, e.phase) for e in taken] == [
        (0.0, "c0", "label-counts", "label-counts"),
        (2.0, "c0", "losses", "losses"),
    ]
    assert [(e.bytes_down, e.bytes_up) for e in taken] == [
        (answer.task.bytes_down, answer.bytes_up) for answer in (counts, losses)
    ]
    assert update.phase == "train"


def test_a_round_may_consist_of_answers() -> None:
    class InTurn(Asking):
        def scheduler(self) -> Scheduler:
            return InRounds()

        def aggregate(self, updates: Any) -> Any:
            return {update.number: self.on_update(update) for update in updates}

    strategy = InTurn((LOSSES,))
    seen = run(strategy, grid_of(asked_app([]), devices(1.0, 3.0)), num_rounds=2)
    # Both have answered at 3 s, when the training round begins.
    assert [(u.dispatched_at, u.client, u.time) for u in of(events.UpdateApplied, seen)] == [
        (3.0, "c0", 4.0),
        (3.0, "c1", 6.0),
    ]


def states_another_kind(reply: Message, index: int) -> Message:
    reply.content["config"]["kind"] = "label-counts"
    return reply


def brings_a_model(reply: Message, index: int) -> Message:
    reply.content["arrays"] = write(ONES)
    return reply


def brings_nan(reply: Message, index: int) -> Message:
    reply.content["numbers"] = ArrayRecord({"losses": Array(np.array([[np.nan]], np.float32))})
    return reply


def brings_words(reply: Message, index: int) -> Message:
    reply.content["numbers"] = ArrayRecord({"losses": Array(np.array(["a"]))})
    return reply


def brings_no_metrics(reply: Message, index: int) -> Message:
    del reply.content["metrics"]
    return reply


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (
            states_another_kind,
            "it answers work of kind 'label-counts': it was asked for 'losses'",
        ),
        (brings_a_model, "it brings arrays that work of kind 'losses' was not asked for"),
        (brings_nan, "not finite: 'losses' holds NaN or infinity"),
        (brings_words, "unusable numbers 'losses'"),
        (brings_no_metrics, "missing records: 0 MetricRecords, not 1"),
    ],
)
def test_an_answer_to_other_work_is_refused_in_one_line(
    spoil: Change, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoiled: list[Message] = []

    def once(reply: Message, index: int) -> Message:
        if spoiled:
            return reply
        spoiled.append(reply)
        return spoil(reply, index)

    strategy = Asking((LOSSES,))
    seen = run(strategy, grid_of(asked_app([], once), devices(1.0)), num_rounds=1)
    (rejected,) = of(events.UpdateRejected, seen)
    assert rejected.reason.startswith(reason)
    assert "\n" not in rejected.reason
    assert f"The answer of c0 was rejected: {rejected.reason}" in caplog.messages
    # The client is queried again, and nothing is lost.
    assert len(strategy.answers["c0"]) == 1
    assert len(of(events.UpdateApplied, seen)) == 1


def trained_for_losses(reply: Message, index: int) -> Message:
    reply.content["config"]["kind"] = "losses"
    return reply


def test_a_model_in_reply_to_other_work_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    grid = grid_of(pulled_app(change=trained_for_losses), devices(1.0))
    seen = run(FedAsync(), grid, max_time=1.5)
    assert [r.reason for r in of(events.UpdateRejected, seen)] == [
        "it answers work of kind 'losses': it was asked for 'train'"
    ]
    said = [line for line in caplog.messages if "rejected" in line]
    assert [line.partition(": it answers")[0] for line in said] == ["The update of c0 was rejected"]
    (line,) = lines_with(caplog, "rejected")
    assert (line["device"], line["cluster"], line["request"]) == ("c0", 0, 0)


class Unheard(FedAsync):
    """Requests a kind of work that no client knows, once."""

    asked = False

    def request_for(self, client: str) -> Request:
        kind, self.asked = (TRAIN if self.asked else "dance"), True
        return Request(client, kind, models=(0,))


def raceme_fleet() -> tuple[RunConfig, Any]:
    keys = {"clients": 2, "partition": "iid", "model": "mclr", "workers": 0, "strategy": "fedasync"}
    config = experiment.resolve(RunConfig.from_mapping(keys))
    return config, experiment.build_grid(config)


def test_work_that_no_client_knows_gives_one_line_that_says_what_they_know() -> None:
    config, grid = raceme_fleet()
    seen: list[events.Event] = []
    Unheard().run(grid, models.initial_arrays(config), 2, observe=seen.append)
    (rejected,) = of(events.UpdateRejected, seen)
    assert "This client has no work of kind 'dance'; it knows train, train-best," in (
        rejected.reason
    )
    assert "\n" not in rejected.reason
    assert len(of(events.UpdateApplied, seen)) == 2


def test_racemes_own_clients_answer_every_kind() -> None:
    config, grid = raceme_fleet()
    strategy = Asking()
    strategy.run(grid, models.initial_arrays(config), 10)
    assert len(strategy.answers) == 2
    for counts, losses in strategy.answers.values():
        assert counts.numbers["label-counts"].shape == (10,)
        assert counts.numbers["label-counts"].sum() == counts.num_examples
        assert losses.numbers["losses"].shape[0] == 2
        assert (losses.numbers["losses"] > 0).all()


# Errors of a method.


def test_a_method_must_not_request_work_of_an_offline_client() -> None:
    class Confused(FedAsync):
        def request_for(self, client: str) -> Request:
            return Request("c1")

    strategy = Confused()
    grid = grid_of(pulled_app(), devices(1.0))
    strategy.progress.fleet.clients["c1"] = Client("c1", 10)
    with pytest.raises(ValueError, match="Confused has work for 'c1', which is away"):
        strategy.run(grid, MODEL, 1)


def test_a_setting_that_no_client_reads_is_refused() -> None:
    class Slower(FedAsync):
        setting = "lr_scale"

        def request_for(self, client: str) -> Request:
            return Request(client, settings={self.setting: 0.1})

    class Declared(Slower):
        needs = Needs(settings=frozenset({"warmth"}))
        setting = "warmth"

    with pytest.raises(
        UserError, match=r"setting in a request of Slower 'lr_scale'\. Did you mean 'lr-scale'\?"
    ):
        Slower().run(grid_of(pulled_app(), devices(1.0)), MODEL, 1)
    # Settings that the method declares, or that the run configures, are accepted.
    Declared().run(grid_of(pulled_app(), devices(1.0)), MODEL, 1)
    own = ConfigRecord({"lr_scale": 1.0})
    Slower().run(grid_of(pulled_app(), devices(1.0)), MODEL, 1, train_config=own)


def test_a_method_must_say_what_becomes_of_updates() -> None:
    with pytest.raises(UserError, match="defines neither on_update"):
        Method().run(grid_of(pulled_app(), devices(1.0)), MODEL, 1)


def test_an_update_starts_from_the_model_that_its_request_names() -> None:
    class Named(FedAsync):
        """Serves a mixture of two models, but lets clients train the second."""

        needs = Needs(bases=True)
        deltas: list[list[float]] = []  # noqa: RUF012

        def initialize(self, vector: Vector) -> None:
            self.clusters = Clusters({0: Model(vector), 1: Model(vector + 8)})
            self.state = self.state_type()

        def on_join(self, client: Client) -> None:
            super().on_join(client)
            self.clusters.assign(client.client_id, {0: 0.5, 1: 0.5})

        def request_for(self, client: str) -> Request:
            return Request(client, models=(1,))

        def on_update(self, update: Update) -> Any:
            self.deltas.append(update.delta.tolist())
            return super().on_update(update)

    strategy = Named()
    # Half way from 8 to 16.
    run(strategy, grid_of(pulled_app([16 * ONES]), devices(1.0)), num_rounds=1)
    assert strategy.deltas == [[4.0] * 8]
    assert strategy.bases.vectors == {}
