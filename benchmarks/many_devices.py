"""Load one server with many devices: lost messages, updates per second, memory.

    python benchmarks/many_devices.py [--server serve superlink] [--devices 200] [--seconds 600]
        [--weights 0] [--think 0] [--join 0] [--json FILE]

Light devices, which are threads with the connection of `raceme device`, echo each message: a
number, and a model of `--weights` weights in eight arrays. The server sends every device its next
message as soon as it has answered, checks each answer, and at the end waits for open ones. The
server is the Fleet API and the grid of `raceme serve` in one process without a strategy, or a
server app on Flower's SuperLink; if both are named, they run one after the other. All on loopback.

Devices that answer at once load the server fully: each of n devices then waits for the others, on
average for n divided by the updates per second. With --think each works for about so many seconds,
and the remaining wait is the server's. With --join they join one after another over so many
seconds, as a fleet of thousands does.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from bundles import write_app  # noqa: E402
from flwr.app import Message  # noqa: E402
from processes import (  # noqa: E402
    Loopback,
    Process,
    free_port,
    loopback,
    resident_memory,
)

from raceme.core.signals import StopSignal  # noqa: E402
from raceme.fleet.device import (  # noqa: E402
    Pause,
    RunOverError,
    StoppedError,
    join,
)
from raceme.fleet.served_grid import ServedGrid  # noqa: E402
from raceme.flower.app import App  # noqa: E402
from raceme.flower.fleet_client import Endpoint, RejoinError  # noqa: E402
from raceme.flower.fleet_protocol import LONGEST_WAIT, generate_keys  # noqa: E402
from raceme.flower.fleet_server import FleetApi  # noqa: E402
from raceme.flower.link_state import LinkState  # noqa: E402
from raceme.flower.messages import identify_process  # noqa: E402

MIB = 1024 * 1024
PROCESSES = 4
"""Processes that devices are spread over."""

DRIVE = """
import time

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict

from raceme.core.messages import from_array, to_array
from raceme.flower.messages import array_record


def drive(grid, devices, seconds, weights):
    nodes = []
    while len(nodes) < devices:
        if hasattr(grid, "wait"):
            grid.wait([], grid.now() + 0.2)
        else:
            time.sleep(0.2)
        nodes = list(grid.get_node_ids())
    print(f"ONLINE {len(nodes)}", flush=True)
    open_tasks, sent, answered, wrong, repeated, seen = {}, 0, 0, 0, 0, set()
    # Every message has a model of its own, as in asynchronous learning.
    model = np.arange(weights, dtype=np.float32)
    cuts = [weights * part // 8 for part in range(1, 8)]

    def give_work(nodes):
        nonlocal sent
        messages = []
        for node in nodes:
            records = {"config": ConfigRecord({"number": sent + len(messages)})}
            if weights:
                parts = np.split(model + (sent + len(messages)), cuts)
                # As a strategy makes and reads models.
                records["arrays"] = array_record(dict(zip("abcdefgh", map(to_array, parts))))
            messages.append(Message(RecordDict(records), node, "train"))
        for key, message in zip(grid.push_messages(messages), messages, strict=True):
            open_tasks[key] = (message.metadata.dst_node_id, sent)
            sent += 1

    def is_right(reply, number):
        if reply.has_error() or reply.content["config"]["number"] != number:
            return False
        if not weights:
            return True
        arrays = [from_array(array) for array in reply.content["arrays"].values()]
        return np.array_equal(np.concatenate(arrays), model + number)

    start, cpu, end = time.monotonic(), time.process_time(), seconds
    give_work(nodes)
    while open_tasks:
        elapsed = time.monotonic() - start
        if elapsed > seconds + 60:
            break
        if hasattr(grid, "wait"):
            replies = grid.wait(open_tasks, grid.now() + 1.0)
            grid.get_node_ids()
        else:
            replies = list(grid.pull_messages(list(open_tasks)))
        free = []
        for reply in replies:
            node, number = open_tasks.pop(reply.metadata.reply_to_message_id)
            repeated += number in seen
            seen.add(number)
            answered += 1
            wrong += not is_right(reply, number)
            free.append(node)
        if elapsed < seconds:
            give_work(free)
            end = time.monotonic() - start
        if not replies and not hasattr(grid, "wait"):
            time.sleep(0.02)
    used = time.process_time() - cpu
    print(
        f"RESULT sent={sent} answered={answered} wrong={wrong} repeated={repeated} "
        f"lost={len(open_tasks)} seconds={end:.1f} app_cpu_seconds={used:.1f}",
        flush=True,
    )
"""

SERVER = (
    DRIVE
    + """
from flwr.serverapp import ServerApp

from raceme.flower.grid import prompt

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    drive(prompt(grid), config["devices"], config["seconds"], config["weights"])
"""
)


def be_server(address: str, devices: int, seconds: float, weights: int) -> None:
    """Run the server part of `raceme serve`, without a strategy."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    state = LinkState(App("tests/none", "1.0.0", b"no bundle"))
    with tempfile.TemporaryDirectory() as folder, FleetApi(state, address) as api:
        grid = ServedGrid(state, Path(folder), api.start)
        print("READY", flush=True)
        namespace: dict[str, Any] = {}
        exec(DRIVE, namespace)
        namespace["drive"](grid, devices, seconds, weights)


# Light devices.

_making = threading.Lock()
"""The source of Flower's messages is a global of the process."""


def be_device(
    endpoint: Endpoint,
    stop: StopSignal,
    join_after: float,
    think: float,
    gaps: list[float],
    used: list[float],
) -> None:
    """Answer messages until told to stop; note the seconds from a reply to the next message.

    The processor time used up to the first message and up to the last reply is noted too, so that
    importing and joining can be left out.
    """
    chance = random.Random()
    stop.wait(join_after)
    while not stop.is_set():
        try:
            with join(endpoint, generate_keys(), stop, register=True) as link:
                pause, sent_at = Pause(0.02, 2.0), math.nan
                while not stop.is_set():
                    try:
                        received = link.receive(LONGEST_WAIT)
                        if received is not None:
                            message = received[1]()
                            if not used:
                                used.append(time.process_time())
                            if not math.isnan(sent_at):
                                gaps.append(time.monotonic() - sent_at)
                            if think:
                                stop.wait(think * chance.uniform(0.5, 1.5))
                            with _making:
                                identify_process(message.metadata.run_id, link.node_id)
                                reply = Message(message.content, reply_to=message)
                            link.send(reply, 0.0)
                            sent_at = time.monotonic()
                            used[1:] = [time.process_time()]
                            pause.reset()
                            continue
                        if link.waited:
                            continue
                    except RunOverError:
                        pass
                    stop.wait(pause.next())
        except RejoinError as error:
            print(f"joining again: {error}", flush=True)
        except StoppedError:
            return


def be_devices(address: str, count: int, think: float, join_seconds: float) -> None:
    stop = StopSignal()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    endpoint = Endpoint(address, True, None)
    gaps: list[float] = []
    used: list[float] = []
    threads = [
        threading.Thread(
            target=be_device,
            args=(endpoint, stop, join_seconds * number / count, think, gaps, used),
        )
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"GAPS {json.dumps([round(gap, 4) for gap in gaps])}", flush=True)
    print(f"CPU {used[-1] - used[0] if used else 0:.2f}", flush=True)


# The measurement.


def start_devices(bed: Loopback, count: int, think: float, join_seconds: float) -> list[Process]:
    command = [sys.executable, __file__, "--superlink", bed.fleet_address, "--think", str(think)]
    command += ["--join", str(join_seconds)]
    sizes = [len(part) for part in np.array_split(range(count), PROCESSES) if len(part)]
    return [bed.start("devices", [*command, "--devices", str(size)]) for size in sizes]


def start_server(bed: Loopback, kind: str, count: int, seconds: float, weights: int) -> Process:
    """Start the server; return the process whose memory is measured."""
    if kind == "superlink":
        return bed.superlink()
    bed.fleet_port = free_port()
    command = [sys.executable, __file__, "--listen", bed.fleet_address, "--devices", str(count)]
    return bed.start("serve", [*command, "--seconds", str(seconds), "--weights", str(weights)])


def cpu_seconds(process_id: int) -> float:
    """Return the processor time of a process and its descendants so far."""
    total = 0.0
    from raceme.fleet.testbed import descendants

    for one in (process_id, *descendants(process_id)):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def measure(
    kind: str, devices: int, seconds: float, weights: int, think: float, join: float
) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, loopback(Path(folder)) as bed:
        server = start_server(bed, kind, devices, seconds, weights)
        if kind == "serve":
            server.wait_for("READY", 120)
        alone = resident_memory(server.handle.pid)
        started = start_devices(bed, devices, think, join)
        run = server
        if kind == "superlink":
            config = "devices = 2\nseconds = 10.0\nweights = 0"
            app = write_app(Path(folder) / "app", server=SERVER, config=config)
            settings = f"devices={devices} seconds={seconds} weights={weights}"
            run = bed.flwr("run", str(app), "here", "--stream", "--run-config", settings)
        run.wait_for(rf"ONLINE {devices}", 120 + join + 2 * devices)
        first = resident_memory(server.handle.pid) / MIB
        per_device = (first * MIB - alone) / devices / 1000
        before = cpu_seconds(server.handle.pid)
        peak, used, deadline = first, 0.0, time.monotonic() + seconds + 90
        while "RESULT" not in run.text() and time.monotonic() < deadline:
            peak = max(peak, resident_memory(server.handle.pid) / MIB)
            used = cpu_seconds(server.handle.pid) - before
            time.sleep(0.5)
        line = run.wait_for(r"RESULT (.*)", 5).group(1)
        numbers = {name: float(value) for name, value in (p.split("=") for p in line.split())}
        numbers["rejoined"] = sum(process.text().count("joining again") for process in started)
        numbers["updates_per_second"] = round(numbers["answered"] / numbers["seconds"], 1)
        if kind == "serve":
            # The single process measures itself, as sampling
            # from outside would miss the start and the end.
            used = numbers["app_cpu_seconds"]
        numbers["server_cpu_ms_per_update"] = round(1000 * used / numbers["answered"], 2)
        numbers |= {"mib_first": round(first), "mib_peak": round(peak)}
        numbers["kb_per_connected_device"] = round(per_device)
        # Includes the data in flight: a model, a reply or both for each device.
        numbers["kb_per_device_peak"] = round((peak * MIB - alone) / devices / 1000)
        for process in started:
            process.handle.terminate()
        for process in started:
            try:
                process.handle.wait(60)
            except subprocess.TimeoutExpired:
                process.handle.kill()
        texts = [process.text() for process in started]
        found = [re.search(r"GAPS (\[.*\])", text) for text in texts]
        gaps = [gap for one in found if one for gap in json.loads(one.group(1))]
        if gaps:
            numbers["gap_p50"], numbers["gap_p99"] = (
                round(float(value), 3) for value in np.percentile(gaps, [50, 99])
            )
        times = [float(one.group(1)) for text in texts if (one := re.search(r"CPU (\S+)", text))]
        numbers["devices_cpu_ms_per_update"] = round(1000 * sum(times) / numbers["answered"], 2)
        return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--server", nargs="+", choices=["serve", "superlink"], default=["serve"])
    parser.add_argument(
        "--weights", type=int, default=0, help="weights of the model in each message"
    )
    parser.add_argument("--devices", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--think", type=float, default=0.0, help="seconds of work on a message")
    parser.add_argument("--join", type=float, default=0.0, help="seconds over which devices join")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    parser.add_argument("--superlink", help=argparse.SUPPRESS)
    parser.add_argument("--listen", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.superlink:
        be_devices(arguments.superlink, arguments.devices, arguments.think, arguments.join)
        return
    if arguments.listen:
        be_server(arguments.listen, arguments.devices, arguments.seconds, arguments.weights)
        return
    asked = {
        name: getattr(arguments, name)
        for name in ("devices", "seconds", "weights", "think", "join")
    }
    results = {}
    for kind in arguments.server:
        results[kind] = {**asked, **measure(kind, **asked)}
        print(kind, f"{time.strftime('%H:%M')}, load {os.getloadavg()[0]:.1f}")
        for name, value in results[kind].items():
            print(f"  {name:26} {value:>10,g}", flush=True)
    if arguments.json:
        text = json.dumps({"processors": os.cpu_count(), **results}, indent=2)
        arguments.json.write_text(text + "\n")
    if any(one["lost"] or one["wrong"] or one["repeated"] for one in results.values()):
        raise SystemExit("messages were lost")


if __name__ == "__main__":
    main()
