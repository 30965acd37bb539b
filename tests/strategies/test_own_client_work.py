"""A user's own method with its own kind of client work, both in this file."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from nodes import context

from raceme.client_app import app
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.messages import NUM_EXAMPLES, ModelSpec
from raceme.core.requests import Answer as Stated
from raceme.core.requests import Outcome, Request, Update
from raceme.core.strategy import Method, Needs
from raceme.flower.messages import identify_process
from raceme.runs import experiment
from raceme.simulation import InProcess, Pool, VirtualGrid
from raceme.simulation.executor import Executor
from raceme.training import models
from raceme.training.work import ClientWork, WorkResult, train_model

CONFIG = RunConfig(clients=6, model="mclr", max_updates=30, workers="0")

# The client half.


def train_short(work: ClientWork) -> WorkResult:
    """Train, and shorten the update to the length that the message names."""
    answer = train_model(work, work.model)
    assert answer.model is not None
    spec = ModelSpec.of(work.model)
    start = spec.unpack(work.model)
    step = spec.unpack(answer.model) - start
    step *= min(1.0, work.number("longest-step", None) / float(np.linalg.norm(step)))
    return WorkResult(
        {**answer.metrics, "length": float(np.linalg.norm(step))}, spec.pack(start + step)
    )


def mean_label(work: ClientWork) -> WorkResult:
    """Report the mean label of the client's samples."""
    labels = work.client.train.y.numpy()
    return WorkResult(
        {NUM_EXAMPLES: len(labels)}, numbers={"mean-label": labels.mean(keepdims=True)}
    )


def nothing(work: ClientWork) -> None:
    """Return no reply, which is an error."""


# The strategy.

TRAIN_SHORT, MEAN_LABEL = f"{__name__}:train_short", f"{__name__}:mean_label"


class ShortSteps(Method):
    """A single model on which clients take short steps, after each has reported its mean label."""

    needs = Needs(
        kinds=frozenset({TRAIN_SHORT, MEAN_LABEL}),
        settings=frozenset({"longest-step"}),
        one_model=True,
    )

    def __init__(self) -> None:
        super().__init__()
        self.labels: dict[str, float] = {}
        self.lengths: list[float] = []

    def request_for(self, client: str) -> Request:
        if client not in self.labels:
            return Request(client, MEAN_LABEL, models=())
        return Request(client, TRAIN_SHORT, settings={"longest-step": 0.25})

    def on_answer(self, answer: Stated) -> None:
        self.labels[answer.task.client] = float(answer.array("mean-label", (1,))[0])

    def on_update(self, update: Update) -> Outcome:
        self.lengths.append(update.metrics["length"])
        self.models[0].mix(update.vector, 0.5)
        return Outcome(cluster=0, staleness=0, weight=0.5)


def run_with(executor: Executor) -> ShortSteps:
    config = experiment.resolve(CONFIG)
    grid = VirtualGrid(
        app, experiment.build_grid(config).nodes, config.to_mapping(), executor=executor
    )
    strategy = ShortSteps()
    strategy.run(
        grid,
        models.initial_arrays(config),
        max_updates=config.max_updates,
        train_config=experiment.training_settings(config),
        plan=experiment.plan(config),
    )
    return strategy


def test_clients_do_work_of_a_users_own_in_process_and_in_worker_processes() -> None:
    here = run_with(InProcess(app))
    assert len(here.labels) == 6
    assert len(here.lengths) == 30
    assert max(here.lengths) == pytest.approx(0.25, rel=1e-4)
    assert all(0 <= label <= 9 for label in here.labels.values())
    pool = Pool("raceme.client_app:app", workers=2)
    try:
        there = run_with(pool)
    finally:
        pool.close()
    assert there.labels == here.labels
    assert np.array_equal(there.models[0].vector, here.models[0].vector)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("nothing", "must return a raceme.training.work.WorkResult, got NoneType"),
        ("missing", "has no .* 'missing'"),
    ],
)
def test_a_function_that_is_no_kind_of_work_is_an_error_of_one_line(
    function: str, said: str
) -> None:
    identify_process()
    content = RecordDict({"config": ConfigRecord({"kind": f"{__name__}:{function}"})})
    with pytest.raises(UserError, match=said) as error:
        app(Message(content, 7, "query"), context(1, CONFIG))
    assert "\n" not in str(error.value)
