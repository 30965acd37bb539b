"""Devices with useless replies do not end a run."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from fleets import MODEL, pulled_app
from flwr.app import Context, Error, Message, RecordDict
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from serving import serving

from raceme.core import events
from raceme.core.signals import StopSignal
from raceme.fleet.device import join
from raceme.flower.fleet_client import Endpoint
from raceme.flower.fleet_protocol import Keys
from raceme.flower.messages import identify_process
from raceme.strategies import FedAsync, Plan


def spoiled(reply: Message, _index: int) -> Message:
    for record in reply.content.array_records.values():
        for array in record.values():
            array.data = array.data[:-4] + np.float32(np.nan).tobytes()
    return reply


def keys_of(pem: bytes) -> Keys:
    private = load_pem_private_key(pem, None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    return private, private.public_key()


def answer_as_device(address: str, key: bytes, partition: int, spoils: bool) -> None:
    """Answer a server's messages; a device that spoils leaves after each reply, and comes back."""
    keys = keys_of(key)
    app = pulled_app([np.ones(8)] * 2, change=spoiled if spoils else None)
    while True:
        with join(Endpoint(address, True), keys, StopSignal(), register=False) as link:
            while True:
                if (received := link.receive(0.5)) is None:
                    continue
                message = received[1]()
                identify_process(message.metadata.run_id, link.node_id)
                context = Context(1, link.node_id, {"partition-id": partition}, RecordDict(), {})
                works = message.metadata.message_type == "train"
                if works and not spoils:
                    # Takes as long as on a slow fleet.
                    time.sleep(12)
                link.send(app(message, context), 0.1)
                if works and spoils:
                    break
        # Stays away long enough for the server to notice.
        time.sleep(1)


def complain(address: str, key: bytes) -> None:
    """Answer every message with a long error."""
    with join(Endpoint(address, True), keys_of(key), StopSignal(), register=False) as link:
        while True:
            if (received := link.receive(0.5)) is not None:
                message = received[1]()
                identify_process(message.metadata.run_id, link.node_id)
                link.send(Message(Error(0, "x" * 5000), reply_to=message), 0.1)


def test_the_reason_of_a_rejection_is_a_short_line(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    seen: list[events.Event] = []
    with serving(
        tmp_path, registered=lambda: {public_key_to_bytes(key.public_key()): "kitchen"}
    ) as server:
        spawn = multiprocessing.get_context("spawn")
        device = spawn.Process(target=complain, args=(server.address, pem), daemon=True)
        device.start()
        try:
            plan = Plan(eval_every=1000, max_time=4.0)
            FedAsync().run(server.grid, MODEL, 1000, plan=plan, observe=seen.append)
        finally:
            device.kill()
            device.join(20)
    reasons = [event.reason for event in seen if isinstance(event, events.UpdateRejected)]
    assert "did not answer its greeting: xxx" in reasons[0]
    assert max(map(len, reasons)) <= 300


@pytest.mark.slow
def test_a_device_that_keeps_reconnecting_does_not_end_the_run(tmp_path: Path) -> None:
    keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(2)]
    pems = [key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) for key in keys]
    seen: list[events.Event] = []
    public = {public_key_to_bytes(key.public_key()): "" for key in keys}
    with serving(tmp_path, registered=lambda: public, clients_min=2) as server:
        spawn = multiprocessing.get_context("spawn")
        devices = [
            spawn.Process(
                target=answer_as_device, args=(server.address, pems[n], n, n == 1), daemon=True
            )
            for n in range(2)
        ]
        for device in devices:
            device.start()
        try:
            plan = Plan(eval_every=1000, max_time=16.0)
            FedAsync().run(server.grid, MODEL, 1000, plan=plan, observe=seen.append)
        finally:
            for device in devices:
                device.kill()
                device.join(20)
    rejected = [event for event in seen if isinstance(event, events.UpdateRejected)]
    # Its pauses are 0, 1, 3, 7 and 15 seconds, however often it comes back.
    assert 2 <= len(rejected) <= 7
    assert any(isinstance(event, events.UpdateApplied) for event in seen)
    assert isinstance(seen[-1], events.RunEnded)
    assert seen[-1].ending is events.Ending.LIMIT


def test_rejections_of_less_than_half_of_the_clients_do_not_count_as_a_useless_run() -> None:
    method = FedAsync()
    progress = method.progress
    progress.fleet.clients.update(dict.fromkeys(("a", "b", "c"), None))  # type: ignore[arg-type]
    progress.rejected_in_a_row = {"a": 10_000}
    assert not progress.reason_of_uselessness()
    progress.rejected_in_a_row = {"a": 10_000, "b": 20}
    assert progress.reason_of_uselessness().startswith("the last 10020 replies were unusable")
    progress.rejected_in_a_row = {"a": 40, "b": 40}
    assert not progress.reason_of_uselessness()
