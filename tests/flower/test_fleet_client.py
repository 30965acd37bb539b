"""A device's connection over slow networks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bad_network import bad_network
from processes import Process, free_port, loopback, raceme
from serving import answer, fetch, number_of, serving

from raceme.core.signals import StopSignal
from raceme.fleet.certificates import make_certificates, read_certificates
from raceme.fleet.device import join
from raceme.flower.fleet_client import Endpoint
from raceme.flower.fleet_protocol import generate_keys


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_a_delay_of_two_seconds_is_tolerated(tmp_path: Path, transport: str) -> None:
    make_certificates(tmp_path / "certs", ["127.0.0.1"], [])
    made = read_certificates(tmp_path / "certs")
    with serving(tmp_path, certificates=made) as server:
        target = server.http if transport == "http" else server.address
        with bad_network(int(target.rpartition(":")[2]), delay=2.0, loss=0.0) as network:
            place = Endpoint(f"127.0.0.1:{network.port}", False, made.authority, transport)
            stop = StopSignal()
            with join(place, generate_keys(), stop, register=True) as link:
                sent = server.push(link.node_id, 1)
                answer(link, fetch(link))
                assert number_of(server.wait(sent)[0]) == 1
                assert link.node_id in server.state.online()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("delay", "loss", "latency"), [(5.0, 0.1, 5.0), (1.0, 0.3, 5.0)])
def test_devices_far_away_train(tmp_path: Path, delay: float, loss: float, latency: float) -> None:
    make_certificates(tmp_path / "certs", ["127.0.0.1"], ["kitchen"])
    with loopback(tmp_path) as bed:
        bed.fleet_port = free_port()
        run = ["--strategy", "fedasync", "--dataset", "digits", "--clients", "2", "--out", "out"]
        run += ["--max-updates", "4", "--eval-every", "100", "--metrics", "off"]
        further = ["--latency", str(latency), "--certificates", "certs"]
        command = raceme("serve", "--address", bed.fleet_address, *run, *further)
        server = bed.start("serve", command)
        server.wait_for("Listening on", 240)
        with bad_network(bed.fleet_port, delay=delay, loss=loss, seed=1) as network:
            device: Process = bed.start(
                "device",
                raceme(
                    *("device", "--superlink", f"127.0.0.1:{network.port}"),
                    *("--root-certificates", "certs/ca.crt", "--key", "certs/devices/kitchen"),
                    *("--node-config", "partition-id=0 num-partitions=2"),
                    *("--latency", str(latency)),
                ),
            )
            assert server.wait(1000) == 0, device.text()
            assert network.lost
    assert len(re.findall(r"train task \d+: done", device.text())) >= 4
