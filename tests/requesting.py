"""A method whose clients request work, and clients whose losses depend on the data's step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from fleets import pulled_app
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from raceme.core.messages import LOSSES
from raceme.core.requests import Answer, InFlight, Request
from raceme.core.schedulers import OnRequest, RequestParameters
from raceme.core.scheduling import Scheduler
from raceme.strategies import FedAsync


def asking(requests: str, seconds: float = 10.0, **options: float) -> OnRequest:
    return OnRequest(RequestParameters(requests, seconds, **options))


class Asks(FedAsync):
    """FedAsync with clients that request work, or measure their losses first."""

    def __init__(self, dispatch: OnRequest, seed: int = 0) -> None:
        self._asked = dispatch
        self.kinds: list[tuple[float, str, str]] = []
        super().__init__(seed=seed)

    scheduling: OnRequest

    def scheduler(self) -> Scheduler:
        return self._asked

    def request_for(self, client: str) -> Request:
        if self.scheduling.evaluates_loss(client):
            held = self.spec.pack(self.models[0].vector)
            return self.scheduling.loss_evaluation(client, held, cost=0.0)
        return Request(client)

    def on_sent(self, task: InFlight) -> None:
        self.kinds.append((self.now(), task.client, task.kind))

    def on_answer(self, answer: Answer) -> None:
        assert self.scheduling.take_loss(answer)


def drifting_app(rise: Sequence[float]) -> ClientApp:
    """An app whose clients echo the model, and have a given loss at each step of the data."""
    app, plain_app = ClientApp(), pulled_app()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return plain_app(message, context)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return plain_app(message, context)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        config = message.content["config"]
        if config.get("kind") != LOSSES:
            return plain_app(message, context)
        assert list(message.content.array_records) == ["arrays"]
        losses = np.full((1, 4), rise[int(config.get("step", 0))], np.float32)
        numbers = ArrayRecord({LOSSES: Array(losses)})
        metrics = MetricRecord({"num-examples": 4})
        return Message(RecordDict({"metrics": metrics, "numbers": numbers}), reply_to=message)

    return app
