"""A server that is killed again and again: no update is lost beyond a checkpoint, or doubled."""

from __future__ import annotations

import random
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from light_devices import Behaviour, online
from processes import free_port, loopback, raceme

from raceme.fleet.certificates import make_certificates, read_device_key
from raceme.flower.fleet_client import Endpoint

KILLS = 20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_killed_at_twenty_random_moments_loses_and_doubles_nothing(
    tmp_path: Path,
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    moments, certs, out = random.Random(seed), tmp_path / "certs", tmp_path / "out"
    names = ["kitchen", "garden", "cellar"]
    make_certificates(certs, ["127.0.0.1"], names)
    keys = {name: read_device_key(certs / "devices" / name) for name in names}
    behaviours = {name: Behaviour(training_seconds=0.05, update_std=0.01) for name in names}
    counts: list[int] = []
    with loopback(tmp_path) as bed:
        address = f"127.0.0.1:{free_port()}"
        run = ["--address", address, "--certificates", str(certs), "--out", str(out)]
        run += ["--strategy", "fedasync", "--dataset", "digits", "--clients", "3"]
        run += ["--max-updates", "1000000", "--checkpoint-every", "10", "--metrics", "off"]
        endpoint = Endpoint(address, root_certificates=(certs / "ca.crt").read_bytes())
        with online(endpoint, behaviours, keys):
            for _ in range(KILLS):
                server = bed.start("serve", raceme("serve", *run))
                server.wait_for(r"update +\d+ ", 120)
                time.sleep(moments.uniform(0.0, 2.0))
                assert server.handle.poll() is None, server.describe()
                server.handle.kill()
                server.wait()
                assert "Traceback" not in server.text(), f"seed {seed}: {server.describe()}"
                counts.append(_checked(out, seed))
            server = bed.start("serve", raceme("serve", *run))
            server.wait_for(r"update +\d+ ", 120)
            assert server.stop() == 130, server.describe()
    counts.append(_checked(out, seed))
    # A kill undoes less than the updates of one checkpoint interval.
    assert counts[-1] > counts[0], f"seed {seed}: {counts}"
    assert not any("refused" in process.text() for process in bed.processes), f"seed {seed}"


def _checked(out: Path, seed: int) -> int:
    """Assert that the store is complete and has each update once; return their number."""
    with closing(sqlite3.connect(out / "run.sqlite")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)], f"seed {seed}"
        rows = connection.execute("SELECT seq, client, dispatched_at FROM updates").fetchall()
    assert sorted(row[0] for row in rows) == list(range(1, len(rows) + 1)), f"seed {seed}"
    assert len({row[1:] for row in rows}) == len(rows), f"seed {seed}"
    return len(rows)
