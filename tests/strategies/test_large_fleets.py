"""Fleets too large for all pairs: exact below the limit, correct and bounded above it."""

import copy
import heapq
import tracemalloc

import numpy as np
import pytest
from clustered import homes
from fleets import MODEL, grid_of, pulled_app
from probing import EAST, probe, two_groups
from sklearn.metrics import adjusted_rand_score

from raceme.core.clients import Client
from raceme.core.messages import ModelSpec
from raceme.core.requests import InFlight, Update
from raceme.simulation import Device
from raceme.strategies import CASA, CASAParameters, FedAsync, Method, Panicle, Plan
from raceme.strategies.panicle.probes import LANDMARKS

SIZE = 400


class Fleet:
    """Clients of some groups that train a method's models, at different speeds."""

    def __init__(self, method: Method, groups: list[int], seed: int = 0) -> None:
        self.method, self.groups = method, groups
        self.rng = np.random.default_rng(seed)
        base = self.rng.normal(size=SIZE).astype(np.float32)
        shifts = 0.1 * self.rng.normal(size=(max(groups) + 1, SIZE)).astype(np.float32)
        self.optima = base + shifts
        method._spec = ModelSpec(("w",), ((SIZE,),), ("float32",))
        method.initialize(base.copy())
        method.restored()
        self.sent: list[tuple[InFlight, np.ndarray]] = []
        self.due: list[tuple[float, int]] = []
        self.number = 0
        for client in range(len(groups)):
            self.join(client)

    def join(self, client: int, at: float = 0.0) -> None:
        known = Client(str(client), 100)
        self.method.progress.fleet.clients[str(client)] = known
        self.method.on_join(known)
        self.sent.append((InFlight(0, "", 0, 0, 0, 0.0, 0), np.empty(0)))
        self.give(client)
        heapq.heappush(self.due, (at + self.rng.uniform(), client))

    def give(self, client: int) -> None:
        name, method = str(client), self.method
        k = method.clusters.main(name)
        work, model = method.request_for(name), method.models[k]
        start = method.initial if work.models == () else model.vector
        self.number += 1
        task = InFlight(self.number, name, k, model.version, method.progress.updates, 0.0, 0)
        if work.phase:
            task = InFlight(*(*self._head(task), {}, task.kind, 0, work.phase))
        method.open_task(task)
        self.sent[client] = task, np.array(start, np.float32)

    @staticmethod
    def _head(task: InFlight) -> tuple[object, ...]:
        return (
            *(task.number, task.client, task.cluster, task.version),
            *(task.updates, task.sent_at, task.bytes_down),
        )

    def train(self, updates: int) -> None:
        for _ in range(updates):
            time, client = heapq.heappop(self.due)
            task, start = self.sent[client]
            noise = 0.01 * self.rng.normal(size=SIZE).astype(np.float32)
            vector = start + 0.6 * (self.optima[self.groups[client]] - start) + noise
            self.method.applied([Update(task, vector.astype(np.float32), 100, 0.0)])
            self.method.progress.updates += 1
            self.method.close_task(task)
            self.give(client)
            heapq.heappush(self.due, (time + self.rng.uniform(0.9, 1.1), client))

    def labels(self) -> list[int]:
        return [self.method.clusters.main(str(client)) for client in range(len(self.groups))]


def casa(seats: int) -> CASA:
    return CASA(CASAParameters(sketch=64, exact_up_to=seats))


def panicle() -> Panicle:
    method = Panicle()
    method.initial = np.zeros(SIZE, np.float32)  # type: ignore[assignment]
    return method


def trained(method: Method, groups: list[int], passes: float) -> Fleet:
    fleet = Fleet(method, groups)
    if isinstance(method, Panicle):
        method.initial = method.state.initial  # type: ignore[assignment]
    fleet.train(int(passes * len(groups)))
    return fleet


def test_up_to_the_size_nothing_changes() -> None:
    groups = [client % 3 for client in range(45)]
    bounded, unbounded = (trained(casa(size), groups, 5).method for size in (45, 0))
    assert [m.vector.tobytes() for m in bounded.models.values()] == [
        m.vector.tobytes() for m in unbounded.models.values()
    ]
    assert bounded.clusters.members == unbounded.clusters.members
    assert len(bounded.models) > 1
    assert bounded.rng.bit_generator.state == unbounded.rng.bit_generator.state


def test_above_it_the_groups_are_those_of_comparing_all() -> None:
    groups = [client % 4 for client in range(240)]
    exact, sampled = (trained(casa(size), groups, 5).labels() for size in (0, 80))
    assert adjusted_rand_score(exact, sampled) == 1.0
    assert adjusted_rand_score(groups, sampled) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: casa(100), panicle])
def test_a_fleet_of_thousands_is_divided(make: type[Method]) -> None:
    # Groups of a half, three tenths and a fifth, in blocks instead of in turn.
    groups = [0] * 1000 + [1] * 600 + [2] * 400
    fleet = trained(make(), groups, 3)
    assert adjusted_rand_score(groups, fleet.labels()) > 0.95


@pytest.mark.parametrize(
    ("make", "clients"),
    [(lambda: casa(50), 150), pytest.param(panicle, 600, marks=pytest.mark.slow)],
)
def test_newcomers_without_a_seat_go_where_they_belong(make: type[Method], clients: int) -> None:
    groups = [client % 3 for client in range(clients)]
    fleet = trained(make(), groups, 4)
    now = fleet.due[0][0]
    for client in range(clients, clients + 15):
        groups.append(client % 3)
        fleet.join(client, at=now)
    fleet.train(5 * clients)
    assert adjusted_rand_score(groups, fleet.labels()) == 1.0


@pytest.mark.slow
def test_what_is_kept_of_pairs_does_not_grow_with_the_fleet() -> None:
    small, large = (trained(casa(50), [0, 1] * half, 2).method.state for half in (100, 200))
    assert small.similarity.shape == large.similarity.shape
    assert small.buffers.slots.shape == large.buffers.slots.shape
    assert large.clients != [str(client) for client in range(50)], "seats are drawn at random"
    state = trained(panicle(), [0, 1] * 400, 3).method.state
    # Landmarks include some of each of two clusters.
    assert LANDMARKS <= len(state.landmarks) <= LANDMARKS + 16 < len(state.probes.clear())
    clients, likeness = state.likeness()
    assert likeness.shape == (LANDMARKS, LANDMARKS) == (len(clients), len(clients))


def test_a_newcomer_is_placed_by_the_same_landmarks_after_the_run_is_resumed() -> None:
    strategy = two_groups()
    strategy.on_join(Client("c6", 10))
    restored = Panicle(strategy.parameters)
    restored._spec = strategy.spec
    restored.load_state_dict(copy.deepcopy(strategy.state_dict()))
    assert restored.state.landmarks == strategy.state.landmarks == [f"c{i}" for i in range(6)]
    for method in (strategy, restored):
        probe(method, "c6", *EAST)
    assert homes(restored) == homes(strategy)


def test_a_newcomer_finds_its_cluster_without_its_landmarks() -> None:
    strategy = two_groups()
    for client in ("c6", "c7"):
        strategy.on_join(Client(client, 10))
    probe(strategy, "c6", *EAST)
    probe(strategy, "c6", *EAST)
    # Landmarks were drawn before c6 was in a cluster.
    strategy.state.landmarks = [f"c{i}" for i in range(6)]
    for client in ("c0", "c1", "c2"):
        strategy.on_leave(client)
    probe(strategy, "c7", *EAST)
    probe(strategy, "c7", *EAST)
    assert homes(strategy)["c7"] == homes(strategy)["c6"] == homes(strategy)["c0"]


@pytest.mark.parametrize("make", [FedAsync, lambda: CASA(sketch=4, exact_up_to=50)])
def test_a_client_that_waits_takes_less_than_two_kilobytes(make: type[Method]) -> None:
    def held(clients: int) -> int:
        grid = grid_of(pulled_app(), [Device()] * clients)
        tracemalloc.start()
        method = make()
        method.run(grid, MODEL, 20, plan=Plan(eval_every=10**9, eval_clients=5, concurrency=5))
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return size

    held(10)
    assert (held(600) - held(300)) / 300 < 2000
