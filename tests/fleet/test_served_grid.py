"""A grid in the same process as its Fleet API: messages, nodes, and restarts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import Message
from processes import free_port
from serving import APP, Later, Server, answer, fetch, light_device, number_of, round_trip, serving

from raceme.core.timeline import Resumable, Timeline
from raceme.fleet import served_grid
from raceme.fleet.device import RunOverError
from raceme.fleet.served_grid import Journal, ServedGrid
from raceme.flower import fleet_client as direct
from raceme.flower import link_state as message_state
from raceme.flower.fleet_protocol import generate_keys
from raceme.flower.fleet_server import FleetApi
from raceme.flower.link_state import LinkState
from raceme.flower.messages import NODE_UNAVAILABLE, identify_process
from raceme.runs.checkpoints import read_tree, write_tree


@pytest.fixture
def devices() -> Iterator[ExitStack]:
    """Devices that stay online while a server restarts."""
    with ExitStack() as stack:
        yield stack


def saved(server: Server, folder: Path) -> Any:
    """Return a server's state after a round trip through a checkpoint file."""
    write_tree(folder / "tree.safetensors", server.grid.state_dict(), {})
    return read_tree(folder / "tree.safetensors")[0]


def test_a_wait_ends_without_replies_so_that_a_run_looks_at_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_grid, "_WAIT_SECONDS", 0.1)
    with serving(tmp_path) as server, light_device(server) as link:
        sent = server.push(link.node_id, 1)
        server.grid.get_node_ids()
        waiting = Later(lambda: [server.grid.wait([sent]) for _ in range(20)])
        assert waiting.wait() == [[]] * 20


def test_a_message_and_its_reply_arrive_as_they_were_sent(tmp_path: Path) -> None:
    with serving(tmp_path) as server, light_device(server) as link:
        assert isinstance(server.grid, Timeline)
        assert isinstance(server.grid, Resumable)
        sent = [server.push(link.node_id, number) for number in (7, 8)]
        for number in (7, 8):
            message = fetch(link)
            assert number_of(message) == number
            answer(link, message)
        replies = server.wait(*sent)
        assert [reply.metadata.reply_to_message_id for reply in replies] == sent
        assert [number_of(reply) for reply in replies] == [7, 8]
        assert (replies[0].content["arrays"].to_numpy_ndarrays()[0] == 7).all()
        # No part of the messages is kept.
        assert len(server.state.objects) == 0
        assert not server.state.heads
        assert not server.state.reply_heads


def test_of_many_replies_those_that_came_first_are_handed_out_first_and_the_others_next(
    tmp_path: Path,
) -> None:
    """Work follows when a call's replies are processed, so a call returns a limited number."""
    with serving(tmp_path) as server, light_device(server) as link:
        sent = [server.push(link.node_id, number) for number in range(20)]
        for _ in sent:
            answer(link, fetch(link))
        calls = []
        while sum(map(len, calls)) < len(sent):
            replies = server.wait(*sent[::-1])
            calls.append([number_of(reply) for reply in replies])
        assert calls == [list(range(8)), list(range(8, 16)), list(range(16, 20))]
        # Flower's own method returns all of them at once.
        more = [server.push(link.node_id, number) for number in range(10)]
        for _ in more:
            answer(link, fetch(link))
        assert len(list(server.grid.pull_messages(more))) == 10


def test_nodes_may_join_while_nodes_are_listed() -> None:
    """The server's loop lists nodes while the Fleet API adds some in another thread."""
    state, interval = LinkState(APP), sys.getswitchinterval()

    def come() -> int:
        for number in range(2000):
            node = state.register(b"key %d" % number)
            state.activate(node, 30.0)
        return number

    sys.setswitchinterval(1e-6)
    try:
        coming, seen = Later(come), 0
        while coming.thread.is_alive():
            seen = max(seen, len(state.online()))
    finally:
        sys.setswitchinterval(interval)
    assert coming.wait() == 1999
    assert seen <= len(state.online()) == 2000


@pytest.mark.parametrize("together", [True, False])
def test_objects_travel_together_if_they_are_small_and_are_the_same_bits_if_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    if not together:
        monkeypatch.setattr(message_state, "LARGEST", 10)
        monkeypatch.setattr(direct, "LARGEST", 10)
    with serving(tmp_path) as server, light_device(server) as link:
        handed_out, single = server.state.get_object, []

        def noted(object_id: str) -> bytes | None:
            single.append(object_id)
            return handed_out(object_id)

        monkeypatch.setattr(server.state, "get_object", noted)
        message_id = server.push(link.node_id, 7)
        message = fetch(link)
        assert bool(single) is not together
        assert (message.content["arrays"].to_numpy_ndarrays()[0] == np.full(5, 7)).all()
        answer(link, message)
        (reply,) = server.wait(message_id)
        assert reply.content["arrays"].object_id == message.content["arrays"].object_id
        assert reply.metadata.src_node_id == link.node_id


def test_a_device_waits_at_the_server_until_there_is_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as server, light_device(server) as link:
        asked = []
        handed_out = server.state.next_head

        def noted(node_id: int) -> Message | None:
            asked.append(node_id)
            if len(asked) == 1:
                waiting.append(Later(lambda: server.push(link.node_id, 5)))
            return handed_out(node_id)

        waiting: list[Later] = []
        monkeypatch.setattr(server.state, "next_head", noted)
        assert number_of(fetch(link)) == 5
        # The device called once when it joined and once for the message; it did not poll.
        assert len(asked) <= 2
        waiting[0].wait()
        assert not link.waited
        assert link.receive(0.05) is None
        assert link.waited


def test_work_for_several_devices_at_once_wakes_all_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as server, ExitStack() as stack:
        links = [stack.enter_context(light_device(server)) for _ in range(4)]
        asked, all_wait = set(), threading.Event()
        handed_out = server.state.next_head

        def noted(node_id: int) -> Message | None:
            found = handed_out(node_id)
            asked.add(node_id)
            if len(asked) == len(links):
                all_wait.set()
            return found

        monkeypatch.setattr(server.state, "next_head", noted)
        fetching = [Later(partial(fetch, link)) for link in links]
        assert all_wait.wait(10)
        # The lock delays the Fleet API at the first message until all of them are there.
        with server.state.lock:
            for number, link in enumerate(links):
                server.push(link.node_id, number)
        assert [number_of(cast(Message, one.wait())) for one in fetching] == [0, 1, 2, 3]


def test_a_message_whose_way_to_the_device_failed_is_handed_out_again(tmp_path: Path) -> None:
    with serving(tmp_path) as server, light_device(server) as link:
        message_id = server.push(link.node_id, 4)
        # The response is lost on its way to the device.
        assert server.state.next_for(link.node_id, "") is not None
        message = fetch(link)
        assert number_of(message) == 4
        # The device has received the message, and works on it.
        assert link.receive() is None
        answer(link, message)
        assert number_of(server.wait(message_id)[0]) == 4
        assert link.receive() is None


def test_a_message_that_is_given_up_is_not_handed_out(tmp_path: Path) -> None:
    with serving(tmp_path) as server, light_device(server) as link:
        first, second = (server.push(link.node_id, number) for number in (1, 2))
        server.grid.forget([first])
        message = fetch(link)
        assert number_of(message) == 2
        server.grid.forget([second])
        answer(link, message)
        assert link.receive() is None
        assert len(server.state.objects) == 0


def test_the_messages_of_a_node_that_leaves_are_answered_with_an_error(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        with light_device(server) as link:
            done, undone = (server.push(link.node_id, number) for number in (1, 2))
            answer(link, fetch(link))
            fetch(link)
        replies = {reply.metadata.reply_to_message_id: reply for reply in server.wait(done, undone)}
        # The reply before the restart counts.
        assert number_of(replies[done]) == 1
        if undone not in replies:
            replies |= {undone: server.wait(undone)[0]}
        assert replies[undone].error.code == NODE_UNAVAILABLE


def test_a_registered_device_that_restarts_loses_its_work(tmp_path: Path) -> None:
    keys = generate_keys()
    with serving(tmp_path) as server, light_device(server) as link:
        other = server.push(link.node_id, 3)
        with ExitStack() as stack:
            known = {node.public_key: "other" for node in server.state.nodes.values()}
            server.state.admit({**known, _pem(keys): "kitchen"})
            device = stack.enter_context(light_device(server, keys))
            fetched, waiting = (server.push(device.node_id, number) for number in (1, 2))
            fetch(device)
            # The device leaves and rejoins before the server has noticed its absence.
            server.state.deactivate(device.node_id)
            server.state.greet(device.node_id)
            session = server.state._sessions[device.node_id]
            assert server.state.activate(device.node_id, 30.0, session)
            (reply,) = server.wait(fetched, waiting, other)
            assert reply.metadata.reply_to_message_id == fetched
            assert reply.error.code == NODE_UNAVAILABLE
            assert number_of(fetch(device)) == 2


def _pem(keys: Any) -> bytes:
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    return public_key_to_bytes(keys[1])


def test_a_node_cannot_answer_for_another(tmp_path: Path) -> None:
    with serving(tmp_path) as server, light_device(server) as link, light_device(server) as other:
        message_id = server.push(link.node_id, 1)
        message = fetch(link)
        identify_process(message.metadata.run_id, link.node_id)
        forged = Message(message.content, reply_to=message)
        with pytest.raises(RunOverError, match="another node"):
            other.send(forged, 0.1)
        assert server.grid.pull_messages([message_id]) == []
        answer(link, message)
        assert number_of(server.wait(message_id)[0]) == 1


def test_the_clock_stands_until_there_are_enough_clients(tmp_path: Path) -> None:
    with serving(tmp_path, clients_min=2) as server, light_device(server) as first:
        waiting = Later(lambda: server.grid.wait([], 0.0))
        assert list(server.grid.get_node_ids()) == []
        assert server.grid.now() == 0
        # Only the arrival of a second node ends the wait.
        with light_device(server) as second:
            assert waiting.wait() == []
            assert set(server.grid.get_node_ids()) == {first.node_id, second.node_id}
            before = server.grid.now()
            assert server.grid.wait([], before + 0.01) == []
            assert server.grid.now() > before


def test_open_messages_and_nodes_survive_a_restart(tmp_path: Path, devices: ExitStack) -> None:
    port = free_port()
    with serving(tmp_path / "journal", port) as server:
        links = [devices.enter_context(light_device(server)) for _ in range(2)]
        fetched, waiting = (server.push(link.node_id, i) for i, link in enumerate(links))
        message = fetch(links[0])
        answered = server.push(links[0].node_id, 2)
        answer(links[0], fetch(links[0]))
        server.grid.wait([])
        tree = saved(server, tmp_path)
    with serving(tmp_path / "journal", port, saved=tree) as server:
        assert server.grid.keeps_messages
        assert set(server.grid.get_node_ids()) == {link.node_id for link in links}
        assert server.grid.now() >= tree["time"]
        # For Raceme's devices a message is stored whole, not as objects.
        soon = server.push(links[1].node_id, 9)
        assert soon not in server.state.objects
        server.grid.forget([soon])
        # A stored reply, a task in progress, and a message that was not fetched.
        assert number_of(server.wait(fetched, waiting, answered)[0]) == 2
        answer(links[0], message)
        assert number_of(server.wait(fetched, waiting)[0]) == 0
        answer(links[1], fetch(links[1]))
        assert number_of(server.wait(waiting)[0]) == 1
        devices.close()


def test_nodes_that_nobody_waits_for_are_gone_after_a_restart(
    tmp_path: Path, devices: ExitStack
) -> None:
    port = free_port()
    with serving(tmp_path / "journal", port) as server:
        devices.enter_context(light_device(server))
        tree = saved(server, tmp_path)
        devices.close()
    for reconnect, nodes in ((90.0, 1), (0.0, 0)):
        with serving(tmp_path / "journal", port, saved=tree, reconnect=reconnect) as server:
            assert len(server.state.online()) == nodes


def test_replies_since_the_checkpoint_are_there_after_a_crash_and_others_are_not(
    tmp_path: Path, devices: ExitStack
) -> None:
    port = free_port()
    with serving(tmp_path / "journal", port) as server:
        link = devices.enter_context(light_device(server))
        known = server.push(link.node_id, 1)
        message = fetch(link)
        tree = saved(server, tmp_path)
        answer(link, message)
        # The strategy processes the reply and sends new work; then the process dies.
        assert number_of(server.wait(known)[0]) == 1
        unknown = server.push(link.node_id, 2)
        later = fetch(link)
    with serving(tmp_path / "journal", port, saved=tree) as server:
        answer(link, later)
        (reply,) = server.wait(known)
        assert reply.metadata.reply_to_message_id == known
        assert number_of(reply) == 1
        assert not server.state.reply_heads
        assert all(reply.has_error() for reply in server.grid.pull_messages([unknown]))
        round_trip(server, link, 3)
        devices.close()
    # A second crash before the next checkpoint.
    with serving(tmp_path / "journal", port, saved=tree) as server:
        assert number_of(server.wait(known)[0]) == 1


def test_registered_devices_stay_their_nodes_from_the_first_checkpoint_on(tmp_path: Path) -> None:
    keys = [_pem(generate_keys()) for _ in range(3)]
    state = LinkState(APP)
    address = f"127.0.0.1:{free_port()}"
    with FleetApi(state, address, registered=lambda: dict.fromkeys(keys[:2], "")) as api:
        # Saved before any device can connect.
        grid = ServedGrid(state, tmp_path / "journal", api.start)
        tree = grid.state_dict()
        grid.close()
    nodes = {key: state.node_of(key) for key in keys[:2]}
    # In the meantime one key is removed and another one added.
    with serving(
        tmp_path / "journal", registered=lambda: dict.fromkeys(keys[1:], ""), saved=tree
    ) as server:
        assert server.state.node_of(keys[0]) is None
        assert server.state.node_of(keys[1]) == nodes[keys[1]]
        assert server.state.node_of(keys[2]) not in (None, *nodes.values())
        assert len(server.state.nodes) == 2


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as server, pytest.raises(ValueError, match="virtual time"):
        server.grid.load_state_dict({"queue": {}})


def test_entries_come_back_in_order_from_a_file_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "new")
    entries = [[b"a", b"", b"bc"], [b"d"], []]
    first = journal.begin()
    journal.append(entries[0])
    second = journal.begin()
    journal.append(entries[1])
    journal.append(entries[2])
    # Nothing was closed, as after a crash.
    again = Journal(tmp_path / "new")
    assert list(again.read(first)) == entries
    assert list(again.read(second)) == entries[1:]
    third = again.begin()
    assert third > second
    again.drop(second)
    assert list(again.read(first)) == entries[1:]


@pytest.mark.parametrize("left", [3, 12, 40])
def test_an_entry_that_was_not_written_wholly_is_not_there(tmp_path: Path, left: int) -> None:
    journal = Journal(tmp_path)
    number = journal.begin()
    journal.append([b"whole", b"entry"])
    journal.close()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:left])
    assert list(Journal(tmp_path).read(number)) == [[b"whole", b"entry"]]
    path.write_bytes(whole[:-40] + b"?" + whole[-39:])
    assert list(Journal(tmp_path).read(number)) == []


def test_an_unwritable_log_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path)
    journal.append([b"before there is a file"])
    journal.begin()
    with Path("/dev/full").open("wb", buffering=0) as full:
        journal._file = full  # type: ignore[assignment]
        journal.append([b"an entry"])
        journal.append([b"an entry"])
    assert caplog.text.count("No space left on device") == 1
