"""A bench for FAACL and related methods: clients answer with losses that a test gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from test_feddrift import Bench

from raceme.core.messages import LOSSES
from raceme.core.requests import Answer, InFlight, Request, Update
from raceme.strategies.faacl import LEND, MATCH

SAMPLES = 8
SPREAD = np.linspace(0.0, 0.01, SAMPLES)
"""Small differences between samples, equal for all models."""

Said = dict[str, dict[int, float]]
"""Loss of each cluster's model on each client's samples."""


class SupportBench(Bench):
    """Clients of FAACL that train and measure by hand; tests decide when their data change."""

    def __init__(self, method: Any, clients: int) -> None:
        method.train_config["validation-share"] = 0.2
        super().__init__(method, clients)
        self.seen: list[Any] = []
        method.report = self.seen.append

    def train(
        self,
        values: dict[str, float],
        examples: dict[str, int] | None = None,
        elsewhere: float | None = None,
    ) -> list[Any]:
        """Play a round in which clients return these values; return the trainings.

        Each is (client, model, kind). Clients that measure models before the round have a loss of 1
        with their own, and `elsewhere` with all others.
        """
        done: list[Any] = []
        while work := self.hand_out():
            for one in work:
                task = self.open_task(one)
                if one.kind == LOSSES and elsewhere is not None:
                    rows = [[1.0]] + [[elsewhere]] * (len(task.candidates) - 1)
                    self.answer(task, {LOSSES: (np.array(rows) + SPREAD).astype(np.float32)})
                    continue
                done.append((task.client, task.cluster, one.kind))
                if self.finish([task], values, examples):
                    return done
        return done

    def finish(
        self,
        tasks: list[InFlight],
        values: dict[str, float],
        examples: dict[str, int] | None = None,
    ) -> bool:
        """Let clients finish their training; return whether that ends the round."""
        for task in tasks:
            vector = np.full(2, values.get(task.client, 0.0), np.float32)
            count = (examples or {}).get(task.client, 10)
            released = self.method.scheduling.accept(Update(task, vector, count, 0.0), 0.0)
            self.idle.add(task.client)
            if released:
                self.method.applied(released)
                self.method.progress.updates += len(released)
            self.method.close_task(task)
        return bool(released)

    def answer(self, task: InFlight, numbers: dict[str, Any]) -> None:
        """Let a client answer work that was not training."""
        self.method.on_answer(Answer(task, 10, numbers=numbers))
        self.end(task)

    def end(self, task: InFlight) -> None:
        """End work without an update."""
        self.method.close_task(task)
        self.method.scheduling.lost(task, 0.0)
        self.idle.add(task.client)

    def compare(self, said: Said) -> dict[str, list[int]]:
        """Let clients measure models; return the requested models of each client."""
        asked = {}
        for work in self.hand_out():
            assert work.kind == LOSSES
            task = self.open_task(work)
            asked[task.client] = list(task.candidates)
            rows = [said[task.client][model] + SPREAD for model in task.candidates]
            self.answer(task, {LOSSES: np.array(rows, np.float32)})
        return asked

    def search(
        self, loss: Callable[[str, str, str], float], forgotten: tuple[str, ...] = ()
    ) -> list[Request]:
        """Answer all requests of searches; return the requests.

        ``loss(model, client, set)`` gives the loss of a cluster's model such as ``"3"``, or of a
        client's such as ``"c1"``, on a client's set ``"validation"`` or ``"memory-0"``.
        """
        asked: list[Request] = []
        while work := [w for w in self.hand_out() if w.kind in (MATCH, LEND)]:
            for one in work:
                asked.append(one)
                self._found(one, loss, forgotten)
        return asked

    def _found(
        self, work: Request, loss: Callable[[str, str, str], float], forgotten: tuple[str, ...]
    ) -> None:
        request = self.method.state.requests[work.client]
        task = self.open_task(work)
        own = [] if work.client in forgotten else [f"memory-{step}" for step in request.steps]
        if work.kind == LEND:
            parts = {
                f"{name}-{part}": np.ones(SAMPLES, np.float32) for name in own for part in "xy"
            }
            self.answer(task, parts)
            return
        sets = {name: (work.client, name) for name in (*own, "validation")}
        for index, lent in enumerate(request.borrowed):
            sets[f"borrowed-{index}"] = (lent.client, f"memory-{lent.step}")
        numbers = {
            name: np.array(
                [
                    loss(model, *sets[name]) + SPREAD
                    for model in (*map(str, request.clusters[name]), *request.clients[name])
                ],
                np.float32,
            )
            for name in request.sets
            if name in sets
        }
        self.answer(task, numbers)
