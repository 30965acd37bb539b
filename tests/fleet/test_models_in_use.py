"""Applications beside real devices, while processes are killed and versions change."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import ROOT, Loopback, Process, free_port, loopback, raceme, wait_until

from raceme.core.errors import UserError
from raceme.records.control import command
from raceme.reporting.artefacts import export_model

pytestmark = pytest.mark.slow

DEVICES = 3
RUN = ["--strategy", "fedasync", "--dataset", "digits", "--eval-every", "6", "--out", "out"]
RUN += ["--clients", "3", "--groups", "0.5,0.5", "--checkpoint-every", "5", "--canary", "0.4"]
RUN += ["--version-pause", "0"]
STARTING = ("No server runs", "takes no commands", "no run in", "does not exist")
READER = """
import json, sys, time, warnings
import torch
warnings.simplefilter("ignore")
while True:
    for path in sys.argv[1:]:
        about = {"model.json": ""}
        try:
            model = torch.jit.load(path, _extra_files=about)
        except ValueError as error:
            assert "does not exist" in str(error)
            continue
        scores = model(torch.rand(4, 1, 8, 8))
        assert scores.shape == (4, 10) and torch.isfinite(scores).all()
        print(path, json.loads(about["model.json"])["version"], flush=True)
    time.sleep(0.01)
"""


def serve(bed: Loopback, *options: str) -> Process:
    bed.fleet_port = bed.fleet_port or free_port()
    command_line = raceme("serve", "--address", bed.fleet_address, *RUN, *options)
    return bed.start("serve", [*command_line, "--metrics", f"127.0.0.1:{free_port()}"])


def device(bed: Loopback, number: int) -> Process:
    return bed.device(
        *("--insecure", "--model-file", str(bed.home / f"model-{number}.pt")),
        *("--node-config", f"partition-id={number} num-partitions={DEVICES}"),
    )


def asked(out: Path, name: str, **arguments: object) -> Any:
    """Send the server a command, and retry while it is starting."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return command(out, name, **arguments)
        except UserError as error:
            is_starting = any(said in str(error) for said in STARTING)
            if not is_starting or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def in_use(out: Path) -> int:
    rows = [row for row in asked(out, "versions") if row["stage"] == "in-use"]
    return int(rows[0]["version"]) if rows else 0


def until(condition: Any, *processes: Process) -> None:
    wait_until(condition, 180, lambda: "\n".join(each.describe() for each in processes))


def test_versions_survive_kills_and_an_operator_goes_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with loopback(tmp_path) as bed:
        server = serve(bed)
        devices = [device(bed, number) for number in range(DEVICES)]
        files = [str(tmp_path / f"model-{number}.pt") for number in range(DEVICES)]
        reader = bed.start("reader", [sys.executable, "-c", READER, *files])
        until(lambda: in_use(out) >= 2, server, *devices)
        until(lambda: all(f"{file} " in reader.text() for file in files), reader, *devices)
        # Server and a device are killed during a rollout.
        until(lambda: {r["stage"] for r in asked(out, "versions")} & {"trial", "canary"}, server)
        before = in_use(out)
        server.handle.kill()
        devices[0].handle.kill()
        server.wait()
        table = json.loads((out / "versions" / "versions.json").read_text())
        found = {f"{row['cluster']}-{row['number']}.safetensors" for row in table["versions"]}
        assert found <= {path.name for path in (out / "versions").iterdir()}
        server = serve(bed, "--reconnect", "5")
        devices[0] = device(bed, 0)
        until(lambda: in_use(out) > before, server, *devices)

        # An operator rolls back while devices test a version, as they do every few updates.
        kept = [row["version"] for row in asked(out, "versions") if row["stage"] == "former"]
        answer = asked(out, "rollback", cluster=0, to=kept[-1])
        assert answer["in_use"] == kept[-1]
        until(
            lambda: all(
                row["devices"] == DEVICES
                for row in asked(out, "versions")
                if row["stage"] == "in-use"
            ),
            server,
            *devices,
        )
        line = f"model-0.pt {kept[-1]}\n"
        seen = reader.text().count(line)
        until(lambda: reader.text().count(line) > seen + 3, reader)
        updates = asked(out, "status")["updates"]
        until(lambda: asked(out, "status")["updates"] > updates + 20, server)
        assert in_use(out) == kept[-1]

        # The version in use can be exported at the same time.
        folder, _ = export_model(out, device="client-1", out=tmp_path / "model")
        about = json.loads((folder / "model.json").read_text())
        assert (about["cluster"], about["version"]) == (0, kept[-1])
        np.save(tmp_path / "x.npy", np.zeros((2, 1, 8, 8), np.float32))
        done = subprocess.run(
            [sys.executable, str(folder / "predict.py"), str(tmp_path / "x.npy")],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        assert len(done.stdout.splitlines()) == 2

        # The operator's choice survives a kill and restart.
        server.handle.kill()
        server.wait()
        server = serve(bed, "--reconnect", "5")
        until(lambda: asked(out, "status")["devices_online"] == DEVICES, server, *devices)
        updates = asked(out, "status")["updates"]
        until(lambda: asked(out, "status")["updates"] > updates + 20, server)
        assert in_use(out) == kept[-1]
        asked(out, "rollback", cluster=0, to=None)
        until(lambda: in_use(out) > kept[-1], server, *devices)
        assert reader.handle.poll() is None, reader.describe()
        # The number of files is bounded: five, the best, the one in use, and the new one.
        assert len(list((out / "versions").glob("*.safetensors"))) <= 8
        assert not [file for file in tmp_path.iterdir() if file.name.endswith(".partial")]
