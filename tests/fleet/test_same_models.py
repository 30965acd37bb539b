"""Runs with Raceme's packed arrays and with Flower's format give the same models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from processes import Loopback, Process, free_port, loopback, raceme

from raceme.records.record import read_run

RUN = ["--strategy", "fedasync", "--dataset", "digits", "--clients", "1", "--groups", "1"]
RUN += ["--model", "cnn", "--max-updates", "3", "--eval-every", "1", "--seed", "5"]
"""One device at a time, so that the order of replies is fixed."""


def models_of(folder: Path, start: Callable[[Loopback], Process]) -> tuple[dict[str, bytes], Path]:
    """Run a server with one device; return the files of its models, and its folder."""
    out = folder / "out"
    folder.mkdir()
    with loopback(folder) as bed:
        bed.fleet_port, bed.http_port = free_port(), free_port()
        places = ("--address", bed.fleet_address, "--http", bed.http_address)
        command = raceme("serve", *places, "--out", "out", *RUN)
        server = bed.start("serve", command)
        start(bed)
        # A SuperNode starts a process that imports torch for each message.
        assert server.wait(900) == 0, server.text()
    found = {path.name: path.read_bytes() for path in (out / "clusters").glob("*.safetensors")}
    return found, out


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_a_run_with_a_negotiating_device_is_bit_for_bit_that_with_a_stock_supernode(
    tmp_path: Path,
) -> None:
    own = ("--insecure", "--node-config", "partition-id=0 num-partitions=1")
    models, out = models_of(tmp_path / "own", lambda bed: bed.device(*own))
    stock, other = models_of(tmp_path / "stock", lambda bed: bed.supernode(0, 1))
    assert models == stock
    assert models
    runs = [read_run(folder) for folder in (out, other)]
    assert [run.updates.seq.tolist() for run in runs] == [[1, 2, 3], [1, 2, 3]]
    losses = [run.updates.train_loss.tolist() for run in runs]
    assert losses[0] == losses[1]
