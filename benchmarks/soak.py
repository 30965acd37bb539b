"""Watch the memory, files and threads of a server over a long time.

    python benchmarks/soak.py [--devices 30] [--seconds 3600] [--think 0.7] [--stay 180]
        [--keep-versions 5] [--json FILE]

`raceme serve` with FedAsync, its store, checkpoints, versions and `/metrics`, which is read every
ten seconds. Light devices in one process, threads with the connection of `raceme device`, return
the received model, slightly changed, after about `--think` seconds of work, and use its versions;
each leaves after `--stay` seconds on average, and comes back as a new node. With `--think 0`, the
difference between `--keep-versions 0` and 5 is the cost of versions.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from light_devices import Behaviour, online  # noqa: E402
from processes import free_port, loopback, raceme, wait_until  # noqa: E402

from raceme.flower.fleet_client import Endpoint  # noqa: E402
from raceme.records.control import command  # noqa: E402


def looked_at(
    process: int, out: Path, metrics: str, started: float, versions: list[dict[str, float]]
) -> dict[str, float]:
    """Return the resources that a server uses now."""
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=60) as page:
        page.read()
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return {
        "minutes": (time.monotonic() - started) / 60,
        "updates": command(out, "status")["updates"],
        "mib": int(status["VmRSS"].split()[0]) / 1024,
        "files": len(os.listdir(f"/proc/{process}/fd")),
        "threads": int(status["Threads"]),
        "versions": max((row["version"] for row in versions), default=0),
        "disk_mib": sum(file.stat().st_size for file in out.glob("versions/*")) / 2**20,
        "events_mib": (out / "run.sqlite").stat().st_size / 2**20,
    }


def cpu_seconds(process: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--devices", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--think", type=float, default=0.7, help="seconds of work on a message")
    parser.add_argument("--stay", type=float, default=180.0, help="seconds online, on average")
    parser.add_argument("--keep-versions", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, loopback(Path(folder)) as bed:
        bed.fleet_port, metrics = free_port(), f"127.0.0.1:{free_port()}"
        keys = ("--strategy", "fedasync", "--dataset", "digits", "--clients", "2")
        keys += ("--groups", "0.5,0.5", "--eval-every", "500")
        places = ("--address", bed.fleet_address, "--metrics", metrics)
        places += ("--keep-versions", str(options.keep_versions), "--version-pause", "0")
        server = bed.start("serve", raceme("serve", *places, "--out", "out", *keys))
        server.wait_for("Listening on", 240)
        behaviour = Behaviour(
            training_seconds=options.think,
            online_seconds=options.stay,
            update_std=0.001,
            uses_versions=True,
        )
        devices = {f"device-{number}": behaviour for number in range(options.devices)}
        with online(Endpoint(bed.fleet_address, insecure=True), devices):
            out, started, rows = Path(folder, "out"), time.monotonic(), []
            wait_until(lambda: command(out, "status")["updates"] > 0, 240, server.describe)
            used = cpu_seconds(server.handle.pid)
            while time.monotonic() < started + options.seconds:
                versions = command(out, "versions") if options.keep_versions else []
                rows.append(looked_at(server.handle.pid, out, metrics, started, versions))
                if len(rows) % 15 == 1:
                    print({name: round(value, 1) for name, value in rows[-1].items()}, flush=True)
                time.sleep(10.0)
            used = cpu_seconds(server.handle.pid) - used
            done = command(out, "status")["updates"]
        assert server.stop() == 130, server.describe()
    print("| minutes | updates | MiB | files | threads | version | versions, MiB | events, MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for share in (0.0, 0.1, 0.25, 0.5, 0.75, 1.0):
        row = rows[min(int(share * len(rows)), len(rows) - 1)]
        print("|" + "|".join(f" {value:,.{int(value < 10)}f} " for value in row.values()) + "|")
    seconds = 60 * (rows[-1]["minutes"] - rows[0]["minutes"])
    print(f"updates per second: {(rows[-1]['updates'] - rows[0]['updates']) / seconds:.1f}")
    print(f"ms of a core per update: {1000 * used / done:.2f}")
    grown = 2**20 * (rows[-1]["events_mib"] - rows[0]["events_mib"])
    per_update = grown / (rows[-1]["updates"] - rows[0]["updates"])
    print(f"bytes of run.sqlite per update: {per_update:.0f}")
    most = {name: max(row[name] for row in rows) for name in ("mib", "files", "threads")}
    print("at most:", {name: round(value) for name, value in most.items()})
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
