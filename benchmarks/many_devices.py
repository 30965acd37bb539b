"""Many devices on one SuperLink: is anything lost, how many updates a second, how much memory.

    python benchmarks/many_devices.py [--devices 200] [--seconds 600] [--json FILE]

Light devices, threads with the connection of `raceme device`, answer a stock SuperLink's messages
with the number that each carries. A server app gives every device its next message as soon as it
has answered, checks each answer, and at the end waits for those that are open. All on loopback.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from bundles import write_app  # noqa: E402
from flwr.app import ConfigRecord, Message, RecordDict  # noqa: E402
from processes import Loopback, Process, loopback  # noqa: E402

from raceme.compat import identify_process  # noqa: E402
from raceme.compat.fleet import Endpoint, generate_keys  # noqa: E402
from raceme.deployment.connection import RejoinError, RunOverError, StoppedError, join  # noqa: E402
from raceme.deployment.polling import Pause  # noqa: E402
from raceme.deployment.stopping import StopSignal  # noqa: E402
from raceme.training.hardware import resident_memory  # noqa: E402

MIB = 1024 * 1024
THREADS = 50
"""Devices per process."""

SERVER = """
import time

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

from raceme.compat.grid import hasten_replies

app = ServerApp()


@app.main()
def main(grid, context):
    hasten_replies()
    nodes = []
    while len(nodes) < context.run_config["devices"]:
        time.sleep(0.2)
        nodes = list(grid.get_node_ids())
    print(f"ONLINE {len(nodes)}", flush=True)
    open_tasks, sent, answered, wrong, repeated, seen = {}, 0, 0, 0, 0, set()

    def give_work(nodes):
        nonlocal sent
        messages = []
        for node in nodes:
            content = RecordDict({"config": ConfigRecord({"number": sent + len(messages)})})
            messages.append(Message(content, node, "train"))
        for key, message in zip(grid.push_messages(messages), messages, strict=True):
            open_tasks[key] = (message.metadata.dst_node_id, sent)
            sent += 1

    start = time.monotonic()
    give_work(nodes)
    while open_tasks:
        elapsed = time.monotonic() - start
        if elapsed > context.run_config["seconds"] + 60:
            break
        replies = list(grid.pull_messages(list(open_tasks)))
        free = []
        for reply in replies:
            node, number = open_tasks.pop(reply.metadata.reply_to_message_id)
            repeated += number in seen
            seen.add(number)
            answered += 1
            wrong += reply.has_error() or reply.content["config"]["number"] != number
            free.append(node)
        if elapsed < context.run_config["seconds"]:
            give_work(free)
            end = time.monotonic() - start
        if not replies:
            time.sleep(0.02)
    print(
        f"RESULT sent={sent} answered={answered} wrong={wrong} repeated={repeated} "
        f"lost={len(open_tasks)} seconds={end:.1f}",
        flush=True,
    )
"""


# Light devices.

_making = threading.Lock()
"""Flower keeps in one place of a process on whose behalf it makes messages."""


def be_device(endpoint: Endpoint, stop: StopSignal) -> None:
    """Answer messages until told to stop."""
    while not stop.is_set():
        try:
            with join(endpoint, generate_keys(), stop, register=True) as link:
                pause = Pause(0.02, 2.0)
                while not stop.is_set():
                    try:
                        received = link.receive()
                        if received is not None:
                            message = received[1]()
                            number = message.content["config"]["number"]
                            content = RecordDict({"config": ConfigRecord({"number": number})})
                            with _making:
                                identify_process(message.metadata.run_id, link.node_id)
                                reply = Message(content, reply_to=message)
                            link.send(reply, 0.0)
                            pause.reset()
                            continue
                    except RunOverError:
                        pass
                    stop.wait(pause.next())
        except RejoinError as error:
            print(f"joining again: {error}", flush=True)
        except StoppedError:
            return


def be_devices(address: str, count: int) -> None:
    stop = StopSignal()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    endpoint = Endpoint(address, True, None)
    threads = [threading.Thread(target=be_device, args=(endpoint, stop)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# The measurement.


def start_devices(bed: Loopback, count: int) -> list[Process]:
    command = [sys.executable, __file__, "--superlink", bed.fleet_address, "--devices"]
    sizes = [min(THREADS, count - first) for first in range(0, count, THREADS)]
    return [bed.start("devices", [*command, str(size)]) for size in sizes]


def measure(devices: int, seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, loopback(Path(folder)) as bed:
        config = "devices = 2\nseconds = 10.0"
        app = write_app(Path(folder) / "app", server=SERVER, config=config)
        superlink = bed.superlink()
        started = start_devices(bed, devices)
        settings = f"devices={devices} seconds={seconds}"
        run = bed.flwr("run", str(app), "here", "--stream", "--run-config", settings)
        run.wait_for(rf"ONLINE {devices}", 60 + devices)
        first = resident_memory(superlink.handle.pid) / MIB
        peak, deadline = first, time.monotonic() + seconds + 90
        while "RESULT" not in run.text() and time.monotonic() < deadline:
            peak = max(peak, resident_memory(superlink.handle.pid) / MIB)
            time.sleep(1.0)
        line = run.wait_for(r"RESULT (.*)", 5).group(1)
        last = resident_memory(superlink.handle.pid) / MIB
        numbers = {name: float(value) for name, value in (p.split("=") for p in line.split())}
        numbers["rejoined"] = sum(process.text().count("joining again") for process in started)
        numbers["updates_per_second"] = round(numbers["answered"] / numbers["seconds"], 1)
        numbers |= {"mib_first": round(first), "mib_peak": round(peak), "mib_last": round(last)}
        for process in started:
            process.handle.terminate()
        for process in started:
            try:
                process.handle.wait(30)
            except subprocess.TimeoutExpired:
                process.handle.kill()
        return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    parser.add_argument("--superlink", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.superlink:
        be_devices(arguments.superlink, arguments.devices)
        return
    numbers = {"devices": arguments.devices, **measure(arguments.devices, arguments.seconds)}
    for name, value in numbers.items():
        print(f"{name:20} {value:>10,g}")
    if arguments.json:
        text = json.dumps({"processors": os.cpu_count(), **numbers}, indent=2)
        arguments.json.write_text(text + "\n")
    if numbers["lost"] or numbers["wrong"] or numbers["repeated"]:
        raise SystemExit("something was lost")


if __name__ == "__main__":
    main()
