"""New model versions for devices over gRPC, with light devices."""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import MODEL, pulled_app, read
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from processes import wait_until
from serving import Server, serving

from raceme.core import events
from raceme.core.errors import UserError
from raceme.core.signals import StopSignal
from raceme.fleet.device import join
from raceme.fleet.served_grid import _TRY, Rollouts
from raceme.flower.fleet_client import Endpoint
from raceme.flower.fleet_protocol import generate_keys
from raceme.flower.messages import identify_process
from raceme.records.versions import Stage, VersionStore
from raceme.strategies import FedAsync, FedAsyncParameters, Plan

NUMBER = 3
BEHAVIOURS = ("trains", "spoils", "is broken")
"""Train towards the target, away from it, or refuse every model."""


class Devices:
    """Devices whose applications use the last model version that they received.

    They run in a process of their own, because the source of messages is a global of the process.

    Attributes
    ----------
    used : list of list
        For each device the versions that it was given, and the mean of the last one's weights.
    """

    def __init__(self, server: Server, folder: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._behaviour, self._folder = spawn.Value("i", 0), folder
        self._process = spawn.Process(
            target=answer_all, args=(server.address, folder, self._behaviour), daemon=True
        )
        self._process.start()

    def behave(self, behaviour: str) -> None:
        self._behaviour.value = BEHAVIOURS.index(behaviour)

    def used(self, number: int) -> list[tuple[int, float]]:
        """Return the versions that a device has received, each with the mean of its weights."""
        file = self._folder / f"used-{number}"
        lines = file.read_text().splitlines() if file.is_file() else []
        return [(int(version), float(mean)) for version, mean in map(str.split, lines)]

    def have(self, version: int) -> bool:
        """Return whether all devices have a version."""
        return all(self.used(k) and self.used(k)[-1][0] == version for k in range(NUMBER))

    def kill(self) -> None:
        self._process.kill()
        self._process.join(20)


def answer_all(address: str, folder: Path, behaviour: Any) -> None:
    """Answer as all devices, in a separate process."""
    sending = threading.Lock()
    threads = [
        threading.Thread(
            target=answer_as_device, args=(address, number, folder, behaviour, sending), daemon=True
        )
        for number in range(NUMBER)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def answer_as_device(
    address: str, number: int, folder: Path, behaviour: Any, sending: threading.Lock
) -> None:
    """Answer a server's messages as one device, and record the versions that it uses.

    Parameters
    ----------
    behaviour : Value
        Place in `BEHAVIOURS`.
    sending : Lock
        Held while a reply is made and sent, as a process has one source node at a time.
    """

    def spoil(reply: Message, _number: int) -> Message:
        if BEHAVIOURS[behaviour.value] == "spoils":
            for record in reply.content.array_records.values():
                for array in record.values():
                    values = np.full(array.shape, -3, np.float32)
                    array.data = array.data[: -values.nbytes] + values.tobytes()
        return reply

    app, told = pulled_app([np.ones(8)] * NUMBER, step=0.2, change=spoil), dict[str, Any]()

    def answer(message: Message, context: Context) -> Message:
        settings = message.content.config_records.get("config", ConfigRecord())
        if settings.get("kind") != "use":
            return app(message, context)
        if "arrays" in message.content and BEHAVIOURS[behaviour.value] != "is broken":
            told.update({key: settings[key] for key in settings if key.startswith("used-")})
            mean = float(read(message.content["arrays"]).mean())
            with (folder / f"used-{number}").open("a") as file:
                file.write(f"{settings['used-version']} {mean}\n")
        records = {"metrics": MetricRecord({"uses": 1}), "config": ConfigRecord(told)}
        return Message(RecordDict(records), reply_to=message)

    with join(Endpoint(address, True), generate_keys(), StopSignal(), register=True) as link:
        while True:
            if (received := link.receive(0.5)) is None:
                continue
            message = received[1]()
            context = Context(1, link.node_id, {"partition-id": number}, RecordDict(), {})
            with sending:
                identify_process(message.metadata.run_id, link.node_id)
                link.send(answer(message, context), 0.01)


@dataclass
class Run:
    """A run with rollouts in a thread, into which functions can be injected between events."""

    server: Server
    rollouts: Rollouts
    decided: list[events.VersionDecided] = field(default_factory=list)
    _asked: list[tuple[Callable[[], object], Future[Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.server.grid.turns.append(self._act)

    def _act(self) -> bool:
        while self._asked:
            function, answer = self._asked.pop(0)
            try:
                answer.set_result(function())
            except Exception as error:
                answer.set_exception(error)
        return False

    def do(self, function: Callable[[], Any]) -> Any:
        answer: Future[Any] = Future()
        self._asked.append((function, answer))
        self.server.grid.wake()
        return answer.result(20)

    def held(self) -> int:
        return int(self.do(lambda: self.rollouts.outcomes[Stage.HELD]))

    def updates(self) -> int:
        return int(self.do(lambda: self.rollouts._method.progress.updates))

    def in_use(self) -> int:
        version = self.do(lambda: self.rollouts.store.in_use(0))
        return 0 if version is None else int(version.number)


@contextmanager
def running(
    folder: Path, *, evaluate: int = 4, clients: int = NUMBER, pause: float = 0.0
) -> Iterator[Run]:
    """Run FedAsync for the devices that join; continue with the versions in the folder."""
    stop: list[str] = []
    with serving(folder / "journal", clients_min=clients) as server:
        method = FedAsync(FedAsyncParameters(alpha=0.5, decay="constant"))
        store = VersionStore(folder, 3)
        rollouts = Rollouts(method, server.state, store, margin=0.02, canary=0.4, pause=pause)
        server.grid.rollouts = rollouts
        run = Run(server, rollouts)
        plan = Plan(eval_every=evaluate)

        def work() -> None:
            def seen(event: events.Event) -> None:
                rollouts(event)
                if isinstance(event, events.VersionDecided):
                    run.decided.append(event)

            method.run(
                server.grid,
                MODEL,
                0,
                plan=plan,
                observe=seen,
                stop_check=lambda: "the test is over" if stop else "",
            )

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield run
        finally:
            stop.append("now")
            thread.join(20)


def go_back(rollouts: Rollouts) -> int | None:
    """Roll back while a device tests a new version; return the version's number, if any."""
    tests = any(device.message and device.asked[0] == _TRY for device in rollouts._devices.values())
    found = [version for version in rollouts.store.of(0) if version.stage is Stage.FORMER]
    version = rollouts.rollback(0, found[-1].number) if found and tests else None
    return None if version is None else version.number


def until(condition: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> Any:
    return wait_until(condition, 60, lambda: caplog.text[-3000:])


def test_a_worse_version_is_held_and_an_operator_goes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "raceme.serve")
    with running(tmp_path) as run:
        devices = Devices(run.server, tmp_path)
        until(lambda: run.in_use() >= 3 and all(devices.used(k) for k in range(NUMBER)), caplog)
        devices.behave("spoils")
        until(lambda: "is held: accuracy" in caplog.text, caplog)
        # The version in use stays, however long the training gets worse.
        held = run.held()
        until(lambda: run.held() >= held + 2, caplog)
        good = run.in_use()
        until(lambda: devices.have(good), caplog)
        for number in range(NUMBER):
            versions, means = zip(*devices.used(number), strict=True)
            assert sorted(versions) == list(versions), "no version is used twice"
            assert min(means) > -0.5, "from 0 towards the target, 1, not to -3"
        devices.behave("trains")
        until(lambda: run.in_use() > good, caplog)

        target = until(lambda: run.do(lambda: go_back(run.rollouts)), caplog)
        until(lambda: devices.have(target), caplog)
        held = run.held()
        until(lambda: run.held() >= held + 2, caplog)
        assert run.in_use() == target
        # The answer of the interrupted test is ignored.
        reasons = [event.reason for event in run.decided if event.outcome == "held"]
        assert "an operator has rolled back to another version" in reasons
        with pytest.raises(UserError, match=r"Version 999 of cluster 0 is not kept; there are \d"):
            run.do(lambda: run.rollouts.rollback(0, 999))
        with pytest.raises(UserError, match="There is no cluster 5: there are 0"):
            run.do(lambda: run.rollouts.rollback(5, 1))
        run.do(lambda: run.rollouts.rollback(0, None))
        until(lambda: run.in_use() > target, caplog)
        # Decisions and their reasons are events of the run.
        used = [event for event in run.decided if event.outcome == "in-use"]
        assert [event.version for event in used if event.reason] == [target]
        assert all(event.score is not None for event in used)
        assert any("of the one in use, on" in event.reason for event in run.decided)
        devices.kill()


def test_versions_are_made_no_more_often_than_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(tmp_path, pause=3600.0) as run:
        devices = Devices(run.server, tmp_path)
        until(lambda: run.in_use() == 1, caplog)
        seen = run.updates()
        # Wait for three evaluations.
        until(lambda: run.updates() > seen + 12, caplog)
        assert [event.version for event in run.decided] == [1]
        assert len(run.do(lambda: run.rollouts.store.of(0))) == 1
        devices.kill()


def test_errors_do_not_end_the_server_and_another_process_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Versions cannot be stored, then a canary cannot load one, then the server is replaced."""
    blocked = tmp_path / "versions"
    blocked.touch()
    with running(tmp_path) as run:
        devices = Devices(run.server, tmp_path)
        devices.behave("is broken")
        until(lambda: "Versions cannot be stored: " in caplog.text, caplog)
        seen = run.updates()
        until(lambda: run.updates() > seen + 12, caplog)
        assert caplog.text.count("Versions cannot be stored: ") == 1
        blocked.unlink()
        until(lambda: "could not use it" in caplog.text, caplog)
        assert run.in_use() == 0
        assert not any(devices.used(k) for k in range(NUMBER))
        devices.kill()
    # The server was killed while only some devices used a version.
    store = VersionStore(tmp_path)
    model = {"w": np.ones(4, np.float32), "b": np.ones((2, 2), np.float32)}
    version = store.change(store.add(0, -1, model, {}), Stage.CANARY, 1.0)
    store.save()
    with running(tmp_path) as run:
        devices = Devices(run.server, tmp_path)
        until(lambda: run.in_use() == version.number, caplog)
        until(lambda: devices.have(version.number), caplog)
        assert all(devices.used(k)[-1] == (version.number, 1.0) for k in range(NUMBER))
        # No later version is better than the exact target.
        until(lambda: run.held() > 1, caplog)
        assert run.in_use() == version.number
        devices.kill()
