"""A bench that tells a scheduler what happens to its clients; and runs with one."""

from __future__ import annotations

import numpy as np
from fleets import MODEL, grid_of, pulled_app

from raceme.core import events
from raceme.core.clients import Client, Fleet, Idle
from raceme.core.messages import TRAIN
from raceme.core.requests import InFlight, Update
from raceme.core.scheduling import InRounds, Scheduler, SelectionContext
from raceme.core.strategy import Method
from raceme.simulation import Device
from raceme.strategies import Plan


class Bench:
    """Clients c0, c1, … that are all idle, and a scheduler that is told what happens to them."""

    def __init__(self, policy: Scheduler, clients: int) -> None:
        self.policy = policy
        self.fleet = Fleet({f"c{i}": Client(f"c{i}", 10, node_id=i) for i in range(clients)})
        self.idle = Idle({}, self.fleet.clients)
        self.tasks: dict[str, InFlight] = {}
        self.number = 0
        for client in self.fleet.clients:
            self.idle.add(client)

    def selection_context(self, now: float, greeting: bool = False) -> SelectionContext:
        """Return the context in which the scheduler selects clients."""
        return SelectionContext(now, self.fleet, self.idle, np.random.default_rng(0), greeting)

    def work(self, now: float, greeting: bool = False, kind: str = TRAIN) -> list[str]:
        """Give the selected clients their work; return their names."""
        chosen = self.policy.choose(self.selection_context(now, greeting))
        for client in chosen:
            name = client.client_id
            several = isinstance(self.policy, InRounds) and self.policy.next_model(name)
            model = int(several or 0)
            self.tasks[name] = InFlight(
                self.number, name, model, 0, 0, now, bytes_down=0, kind=kind
            )
            self.number += 1
            self.policy.sent(self.tasks[name], now)
            self.idle.remove(name)
        return [client.client_id for client in chosen]

    def answer(
        self, client: str, now: float, task: InFlight | None = None, train_loss: float = 0.0
    ) -> list[str]:
        """Let a client answer; return the clients of released updates."""
        update = Update(task or self.tasks[client], np.zeros(1, np.float32), 10, train_loss)
        released = self.policy.accept(update, now)
        self.idle.add(client)
        return [one.task.client for one in released]

    def wake(self, now: float) -> tuple[list[str], list[str]]:
        """Wake the scheduler; return the clients of cancelled tasks and of released updates."""
        numbers, released = self.policy.wake(now)
        updates = list(released)
        late = [name for name, task in self.tasks.items() if task.number in numbers]
        for client in late:
            self.idle.add(client)
            updates += self.policy.lost(self.tasks[client], now)
        return late, [one.task.client for one in updates]

    def leave(self, client: str, now: float) -> list[str]:
        """Take a client offline; return the clients of released updates."""
        self.fleet.clients[client].node_id = None
        self.idle.remove(client)
        return [one.task.client for one in self.policy.left(client, now)]

    def come_back(self, client: str, now: float) -> None:
        """Bring a client back online; its work is lost."""
        self.fleet.clients[client].node_id = 99
        self.policy.joined(client)
        assert not self.policy.lost(self.tasks[client], now)
        self.idle.add(client)


def run(strategy: Method, devices: list[Device], updates: int, **plan: float) -> list[events.Event]:
    """Run a method on clients that all do the same work, and return its events."""
    seen: list[events.Event] = []
    limits = Plan(eval_every=1000, **plan)  # type: ignore[arg-type]
    strategy.run(grid_of(pulled_app(), devices), MODEL, updates, plan=limits, observe=seen.append)
    return seen


def updates_of(seen: list[events.Event]) -> list[tuple[float, str, float]]:
    """Return start, client and end of the work of each update."""
    return [
        (e.dispatched_at, e.client, e.time) for e in seen if isinstance(e, events.UpdateApplied)
    ]
