"""Ids bound to keys: accepted and refused nodes, and no effect on other clients."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from fleets import MODEL, grid_of, pulled_app
from flwr.app import Message
from flwr.clientapp import ClientApp
from log_lines import lines_with
from runs import devices, of

from raceme.core import events
from raceme.core.clients import Fleet
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.identities import BoundToKeys, ForeignIdError, NodeInfo, read_device_keys
from raceme.records.summary import RunSummary
from raceme.runs.experiment import simulate
from raceme.strategies import FedAsync

PUBLIC = [ec.generate_private_key(ec.SECP384R1()).public_key() for _ in range(4)]
"""Public keys of devices, beginning with c0."""


def line(key: int, name: str) -> str:
    written = PUBLIC[key].public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return f"{written.decode()} {name}\n"


class Node:
    """A node as Flower describes it."""

    def __init__(self, node_id: int, key: int | None) -> None:
        self.node_id = node_id
        # Simulated nodes of Flower have random bytes as their key.
        self.public_key = os.urandom(32)
        if key is not None:
            form = PublicFormat.SubjectPublicKeyInfo
            self.public_key = PUBLIC[key].public_bytes(Encoding.PEM, form)


class Nodes:
    """A grid whose nodes have keys."""

    def __init__(self, *keys: int | None) -> None:
        self.keys = list(keys)
        self.asked = 0

    def get_nodes(self) -> Iterable[NodeInfo]:
        self.asked += 1
        return [Node(number, key) for number, key in enumerate(self.keys)]


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    path = tmp_path / "device-keys"
    path.write_text("# the fleet\n\n" + line(0, "c0") + line(1, "c1"))
    return path


def test_a_key_stands_for_its_own_id_only(listed: Path) -> None:
    bound = BoundToKeys(listed, Nodes(0, 1, 2, None))
    bound.check(0, "c0")
    bound.check(1, "c1")
    for node, stated, said in [
        (0, "c1", "its key is that of 'c0'"),
        (1, "c0", "its key is that of 'c1'"),
        (1, "nobody", "its key is that of 'c1'"),
        (1, "node-0", "its key is that of 'c1'"),
        (2, "c0", "its key is none of those in device-keys"),
        (2, "a-new-one", "its key is none of those"),
        (3, "c0", "its key is none of those"),
    ]:
        with pytest.raises(ForeignIdError, match=said) as refused:
            bound.check(node, stated)
        assert refused.value.client_id == stated


def test_an_app_that_states_no_id_takes_part_with_a_key_that_is_known(listed: Path) -> None:
    bound = BoundToKeys(listed, Nodes(0, 2))
    bound.check(0, "node-0")
    with pytest.raises(ForeignIdError):
        bound.check(1, "node-1")


def test_the_grid_is_queried_once_for_all_nodes(listed: Path) -> None:
    nodes = Nodes(0, 1)
    bound = BoundToKeys(listed, nodes)
    bound.check(0, "c0")
    bound.check(1, "c1")
    assert nodes.asked == 1
    nodes.keys.append(0)
    bound.check(2, "c0")
    assert nodes.asked == 2


def test_a_node_that_was_offline_is_queried_again(listed: Path) -> None:
    nodes = Nodes()
    bound = BoundToKeys(listed, nodes)
    with pytest.raises(ForeignIdError, match="node 0 was gone before its key was known"):
        bound.check(0, "c0")
    assert bound.renewed()
    assert not bound.renewed()
    nodes.keys = [0]
    bound.check(0, "c0")


def test_one_id_may_have_several_keys(listed: Path) -> None:
    listed.write_text(listed.read_text() + line(2, "c0"))
    bound = BoundToKeys(listed, Nodes(0, 1, 2))
    bound.check(0, "c0")
    bound.check(2, "c0")


def test_a_file_that_changes_is_read_again(listed: Path) -> None:
    bound = BoundToKeys(listed, Nodes(0, 1, 2))
    assert not bound.renewed()
    listed.write_text(listed.read_text() + line(2, "new"))
    assert bound.renewed()
    assert not bound.renewed()
    bound.check(2, "new")


@pytest.mark.parametrize("spoil", [lambda p: p.write_text("rubbish"), Path.unlink])
def test_a_file_that_is_spoilt_during_a_run_changes_nothing(spoil: object, listed: Path) -> None:
    bound = BoundToKeys(listed, Nodes(0))
    assert callable(spoil)
    spoil(listed)
    assert not bound.renewed()
    bound.check(0, "c0")


OTHER_KIND = ed25519.Ed25519PrivateKey.generate().public_key()
OTHER_LINE = OTHER_KIND.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no key"),
        ("# nobody\n", "there is no key"),
        ("kitchen\n", "line 1"),
        (line(0, "c0") + "ecdsa-sha2-nistp384 AAAA kitchen\n", "line 2"),
        (line(0, "").rstrip() + "\n", "line 1"),
        (f"{OTHER_LINE} kitchen\n", "line 1"),
        (line(0, "\x1b[31mred"), "line 1"),
        (line(0, "c0") + line(0, "c1"), "gives the key of 'c0' to 'c1' too"),
    ],
    # Keys are random: fixed test names are needed by parallel test processes.
    ids=("nothing", "comment", "id", "broken", "nameless", "other-kind", "escape", "twice"),
)
def test_what_is_no_list_of_keys_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "device-keys"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        read_device_keys(path)


def test_a_list_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_device_keys(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="it is no text"):
        read_device_keys(tmp_path / "binary")


# Runs.


def lying_app(lies: dict[int, str]) -> ClientApp:
    """The clients of `pulled_app`, of which some claim another client's id."""
    honest = pulled_app()
    app = ClientApp()

    @app.query()
    def query(message: Message, context) -> Message:  # type: ignore[no-untyped-def]
        reply = honest(message, context)
        partition = int(context.node_config["partition-id"])
        if partition in lies:
            reply.content["config"]["client-id"] = lies[partition]
        return reply

    @app.train()
    def train(message: Message, context) -> Message:  # type: ignore[no-untyped-def]
        return honest(message, context)

    @app.evaluate()
    def evaluate(message: Message, context) -> Message:  # type: ignore[no-untyped-def]
        return honest(message, context)

    return app


def run_with(
    listed: Path,
    lies: dict[int, str],
    *keys: int | None,
    observe: Callable[[events.Event], object] = id,
    updates: int = 10,
) -> list[events.Event]:
    """Run some updates of a fleet with these keys; return the events."""
    grid = grid_of(lying_app(lies), devices(*[1.0] * len(keys)))
    nodes = [Node(node, key) for node, key in zip(grid.get_node_ids(), keys, strict=True)]
    vars(grid)["get_nodes"] = lambda: nodes
    seen: list[events.Event] = []

    def both(event: events.Event) -> None:
        seen.append(event)
        observe(event)

    identities = BoundToKeys(listed, grid)
    FedAsync().run(grid, MODEL, updates, timeout=100.0, observe=both, identities=identities)
    return seen


def test_a_node_with_a_stolen_id_gets_no_work_and_locks_nobody_out(
    listed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The thief has the key of c1, and is greeted before c0.
    seen = run_with(listed, {0: "c0", 1: "c0"}, 1, 0)
    (claim,) = of(events.ClaimRefused, seen)
    assert (claim.client, claim.reason) == (
        "c0",
        f"node {claim.node_id} says it is 'c0', but its key is that of 'c1'",
    )
    (joined,) = of(events.ClientJoined, seen)
    assert joined.client == "c0"
    assert joined.node_id != claim.node_id
    assert {update.client for update in of(events.UpdateApplied, seen)} == {"c0"}
    summary = RunSummary()
    for event in seen:
        summary.observe(event)
    assert summary.refused_claims == 1
    assert summary.rejected == 0
    assert [line["device"] for line in lines_with(caplog, "is refused")] == ["c0"]


def test_honest_clients_all_take_part(listed: Path) -> None:
    seen = run_with(listed, {}, 0, 1)
    assert {event.client for event in of(events.ClientJoined, seen)} == {"c0", "c1"}
    assert not of(events.ClaimRefused, seen)


def test_a_device_registered_during_a_run_takes_part(listed: Path) -> None:
    def add(event: events.Event) -> None:
        if isinstance(event, events.ClaimRefused):
            listed.write_text(listed.read_text() + line(2, "late"))

    seen = run_with(listed, {1: "late"}, 0, 2, observe=add)
    assert len(of(events.ClaimRefused, seen)) == 1
    joined = [(event.time, event.client) for event in of(events.ClientJoined, seen)]
    assert joined[0] == (0.0, "c0")
    assert [client for _, client in joined] == ["c0", "late"]
    assert "late" in {update.client for update in of(events.UpdateApplied, seen)}


def test_a_client_whose_key_is_revoked_leaves_with_its_work(listed: Path) -> None:
    def revoke(event: events.Event) -> None:
        if isinstance(event, events.UpdateApplied) and event.client == "c1":
            listed.write_text(line(0, "c0"))

    seen = run_with(listed, {}, 0, 1, observe=revoke, updates=20)
    clients = [update.client for update in of(events.UpdateApplied, seen)]
    # The fleet is checked every five seconds.
    assert clients.count("c1") < 5
    assert clients[-2:] == ["c0", "c0"]
    assert next(event.client for event in of(events.ClientLeft, seen)) == "c1"
    (given_up,) = [event for event in of(events.UpdateRejected, seen) if event.client == "c1"]
    assert given_up.reason == "the client's key was revoked"
    assert {event.client for event in of(events.ClaimRefused, seen)} == {"c1"}


def test_the_clients_after_one_whose_key_is_revoked_stay(listed: Path) -> None:
    def revoke(event: events.Event) -> None:
        if isinstance(event, events.UpdateApplied) and event.client == "c0":
            listed.write_text(line(1, "c1"))

    seen = run_with(listed, {}, 0, 1, observe=revoke, updates=20)
    assert [event.client for event in of(events.ClientLeft, seen)] == ["c0"]


def test_a_change_of_a_registered_key_is_an_event(listed: Path) -> None:
    grid = grid_of(lying_app({}), devices(1.0))
    changes = [[("c0", "rotated"), ("c7", "revoked")]]
    vars(grid)["key_changes"] = lambda: changes.pop() if changes else []
    seen: list[events.Event] = []
    FedAsync().run(grid, MODEL, 3, timeout=100.0, observe=seen.append)
    told = [(event.client, event.change) for event in of(events.KeyChanged, seen)]
    assert told == [("c0", "rotated"), ("c7", "revoked")]


def test_a_refused_node_is_queried_again_when_the_file_has_changed() -> None:
    fleet = Fleet()
    fleet.refused[7] = ""
    assert fleet.changes([7]) == ([], [])
    assert fleet.changes([7], ask_again=True) == ([7], [])


def test_keys_of_real_devices_have_no_place_in_a_simulation(listed: Path, tmp_path: Path) -> None:
    config = RunConfig(device_keys=str(listed), out=str(tmp_path / "out"))
    with pytest.raises(UserError, match="device-keys"):
        simulate(config)
    assert not (tmp_path / "out").exists()
