"""Compare CASA with landmarks to CASA that compares all clients, on the same updates.

    python3 benchmarks/agreement.py --clients 1000 --seats 200,500

Updates are synthetic, without training: each client moves 0.3 of the way from the received model to
its group's optimum, with noise, and has its own speed. Each case is run once with all clients
compared (`exact-up-to` 0) and once for each number of landmarks (`--seats`). The table lists the
clusters, the adjusted Rand index relative to comparing all clients and to the true groups, and the
updates at which clusters were split.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.metrics import adjusted_rand_score

from raceme.core.clients import Client
from raceme.core.events import ClustersChanged
from raceme.core.messages import ModelSpec
from raceme.core.requests import InFlight, Update
from raceme.strategies import CASA, CASAParameters

WEIGHTS = 2000


@dataclass(frozen=True)
class Case:
    """How much groups differ, and how noisy updates are; both per weight."""

    groups: int
    signal: float
    noise: float


CASES = (Case(4, 0.1, 0.02), Case(8, 0.1, 0.02), Case(4, 0.1, 0.1), Case(4, 0.3, 0.05))


@dataclass
class Played:
    """The result: cluster and true group of each client, splits, milliseconds per update."""

    labels: list[int]
    groups: list[int]
    splits: list[int]
    milliseconds: float


def play(case: Case, clients: int, seats: int, passes: float, seed: int) -> Played:
    """Feed CASA the updates of a fleet."""
    rng = np.random.default_rng(seed)
    base = rng.normal(size=WEIGHTS).astype(np.float32)
    shifts = rng.normal(size=(case.groups, WEIGHTS)).astype(np.float32) * case.signal
    groups = rng.choice(case.groups, size=clients)
    method, splits = CASA(CASAParameters(sketch=256, exact_up_to=seats), seed=seed), list[int]()
    method._spec = ModelSpec(("w",), ((WEIGHTS,),), ("float32",))
    method.initialize(base.copy())
    method.restored()
    for client in range(clients):
        known = method.progress.fleet.clients[str(client)] = Client(str(client), 100)
        method.on_join(known)

    def note(change: ClustersChanged) -> None:
        if change.gone:
            splits.append(method.progress.updates)

    method.clusters.report_to(note)
    sent: dict[int, tuple[InFlight, np.ndarray]] = {}

    def send(client: int, number: int) -> None:
        k = method.clusters.main(str(client))
        model = method.models[k]
        task = InFlight(number, str(client), k, model.version, number, 0.0, 0)
        sent[client] = task, model.vector.copy()
        method.open_task(task)

    for client in range(clients):
        send(client, 0)
    speed = np.exp(rng.normal(size=clients) * 0.15)
    due = [(first, client) for client, first in enumerate(rng.uniform(0, 1, clients) * speed)]
    heapq.heapify(due)
    started = time.process_time()
    for number in range(int(clients * passes)):
        now, client = heapq.heappop(due)
        task, start = sent[client]
        noise = case.noise * rng.normal(size=WEIGHTS).astype(np.float32)
        vector = start + 0.3 * (base + shifts[groups[client]] - start) + noise
        method.applied([Update(task, vector.astype(np.float32), 100, 0.0)])[0]
        method.progress.updates += 1
        method.close_task(task)
        send(client, number + 1)
        heapq.heappush(due, (now + speed[client] * rng.uniform(0.9, 1.1), client))
    spent = (time.process_time() - started) / (clients * passes) * 1e3
    labels = [method.clusters.main(str(client)) for client in range(clients)]
    return Played(labels, groups.tolist(), splits, spent)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--seats", default="200,500")
    parser.add_argument("--passes", type=float, default=8.0, help="updates per client")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = Table(title=f"{options.clients:,} clients")
    for column in ("case", "seed", "seats", "clusters", "ARI (all)", "ARI (true)", "splits", "ms"):
        table.add_column(column)
    results = []
    for case in CASES:
        for seed in (int(text) for text in options.seeds.split(",")):
            exact: list[int] | None = None
            for seats in [0, *(int(text) for text in options.seats.split(","))]:
                found = play(case, options.clients, seats, options.passes, seed)
                exact = found.labels if exact is None else exact
                row = {
                    "clusters": len(set(found.labels)),
                    "ari_all": float(adjusted_rand_score(exact, found.labels)),
                    "ari_true": float(adjusted_rand_score(found.groups, found.labels)),
                    "splits": found.splits,
                    "cpu_ms_per_update": found.milliseconds,
                }
                results.append({**asdict(case), "seed": seed, "seats": seats, **row})
                table.add_row(
                    f"{case.groups} groups, {case.signal:g}, noise {case.noise:g}",
                    *(str(seed), str(seats or "all"), str(row["clusters"])),
                    *(f"{row['ari_all']:.3f}", f"{row['ari_true']:.3f}"),
                    f"{len(found.splits)}, first {found.splits[0] if found.splits else '–'}",
                    f"{found.milliseconds:.2f}",
                )
                if options.json:
                    options.json.write_text(json.dumps(results, indent=2))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
