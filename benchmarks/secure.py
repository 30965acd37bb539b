"""Measure what secure aggregation costs in bytes, time and waits, with clients of different speeds.

    python3 benchmarks/secure.py

FedBuff, whose K is the number of members of a cohort, on virtual time. The fleet has twice as many
clients as a cohort has members. Clients do not train; a task takes them 1 s to 10 s, over links of
1 MB/s. Milliseconds are processor time of this machine, for the work of both sides.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from overhead import idle_app, layers

from raceme.core.chain import Chain
from raceme.core.events import AnswerTaken, Event, UpdateApplied
from raceme.features.secure import Options
from raceme.features.secure.client import work
from raceme.features.secure.server import Secure
from raceme.simulation import Device, Node, VirtualGrid
from raceme.simulation.devices import training_cost
from raceme.strategies import FedBuff, Plan

BANDWIDTH = 1e6
SIZES = (22_000, 1_000_000)


@dataclass(frozen=True)
class Cost:
    """Costs of an update: kB up and down, ms on this machine, and virtual seconds.

    Attributes
    ----------
    interval : float
        Virtual seconds between two updates of the fleet.
    seconds : float
        Median virtual time from a request for training to the update in the model.
    """

    up: float
    down: float
    milliseconds: float
    interval: float
    seconds: float


def app_of(options: Options) -> ClientApp:
    """Make an app that echoes messages through the client half of the feature."""
    idle, made = idle_app(), ClientApp()

    def respond(message: Message, context: Context) -> Message:
        return work(message, context, idle, options) if options.secure else idle(message, context)

    made.train()(respond)
    made.query()(idle)
    made.evaluate()(idle)
    return made


def measured(members: int, size: int, updates: int, secure: bool) -> Cost:
    """Run FedBuff, and return the cost of an update."""
    options = Options(secure, secure_least=members, secure_most=members, secure_seconds=3600.0)
    speeds = np.geomspace(1.0, 10.0, 2 * members)
    devices = [
        Device(float(seconds), bandwidth_up=BANDWIDTH, bandwidth_down=BANDWIDTH)
        for seconds in speeds
    ]
    chain = Chain({"secure": Secure(options)} if secure else {})
    nodes = [Node(1000 + i, device) for i, device in enumerate(devices)]
    grid = VirtualGrid(app_of(options), nodes, cost=partial(training_cost, features=chain))
    method, seen = FedBuff(k=members), list[Event]()
    method.features = chain
    started = time.process_time()
    method.run(grid, layers(size), updates, plan=Plan(eval_every=10**9), observe=seen.append)
    work_seconds = time.process_time() - started
    applied = [event for event in seen if isinstance(event, UpdateApplied)]
    traffic = [event for event in seen if isinstance(event, UpdateApplied | AnswerTaken)]
    return Cost(
        sum(event.bytes_up for event in traffic) / len(applied) / 1e3,
        sum(event.bytes_down for event in traffic) / len(applied) / 1e3,
        work_seconds / len(applied) * 1e3,
        applied[-1].time / len(applied),
        float(np.median([event.time - event.dispatched_at for event in applied])),
    )


def main() -> None:
    """Print the table in Markdown, row by row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--members", default="5,20,100")
    parser.add_argument("--cohorts", type=int, default=3)
    options = parser.parse_args()
    names = ("kB up", "kB down", "ms of work", "s between updates", "s to the model")
    print("| " + " | ".join(["members", "weights", "secure", *names]) + " |")
    print("|" + "---:|" * (3 + len(names)))
    for members in map(int, options.members.split(",")):
        for size in SIZES:
            for secure in (False, True):
                cost = measured(members, size, options.cohorts * members, secure)
                figures = (cost.up, cost.down, cost.milliseconds, cost.interval, cost.seconds)
                row = [str(members), f"{size:,}", "yes" if secure else "no"]
                row += [f"{one:,.1f}" if one >= 10 else f"{one:.2f}" for one in figures]
                print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
