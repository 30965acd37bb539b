"""A link state, its Fleet API and light devices, all in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from processes import free_port

from raceme.core.signals import StopSignal
from raceme.fleet.device import join
from raceme.fleet.served_grid import ServedGrid
from raceme.flower.app import App
from raceme.flower.fleet_client import Endpoint, Link
from raceme.flower.fleet_protocol import LATENCY, Certificates, Keys, generate_keys
from raceme.flower.fleet_server import FleetApi
from raceme.flower.link_state import RECONNECT_SECONDS, LinkState
from raceme.flower.messages import SERVER_NODE_ID, identify_process

APP = App("tests/none", "1.0.0", b"a bundle")


@dataclass
class Server:
    """A served grid, and its address for devices."""

    grid: ServedGrid
    state: LinkState
    address: str
    http: str

    def push(self, node: int, number: int = 0, ttl: float = 600.0) -> str:
        """Send a message with a number and an array."""
        identify_process(self.state.run_id, SERVER_NODE_ID)
        content = RecordDict(
            {
                "config": ConfigRecord({"number": number}),
                "arrays": ArrayRecord([np.full(5, number, np.float32)]),
            }
        )
        (message_id,) = self.grid.push_messages([Message(content, node, "train", ttl=ttl)])
        return message_id

    def wait(self, *message_ids: str) -> list[Message]:
        """Wait for the next replies, like a strategy."""
        deadline = self.grid.now() + 30
        while not (replies := self.grid.wait(message_ids, deadline)):
            self.grid.get_node_ids()
            assert self.grid.now() < deadline, "no reply"
        return replies


@contextmanager
def serving(
    journal: Path,
    port: int = 0,
    *,
    certificates: Certificates | None = None,
    registered: Callable[[], Mapping[bytes, str]] | None = None,
    clients_min: int = 1,
    saved: object = None,
    reconnect: float = RECONNECT_SECONDS,
    largest: int | None = None,
    holder: Callable[[bytes], str] = lambda _key: "",
    latency: float = LATENCY,
) -> Iterator[Server]:
    """Serve a grid, optionally from the saved state of another one."""
    address, http = f"127.0.0.1:{port or free_port()}", f"127.0.0.1:{free_port()}"
    state = LinkState(APP)
    state.reconnect = reconnect
    state.largest = largest or state.largest
    options = {"holder": holder, "latency": latency}
    with FleetApi(state, address, certificates, registered, http, **options) as api:
        grid = ServedGrid(state, journal, lambda: None, clients_min=clients_min)
        if saved is not None:
            assert isinstance(saved, dict)
            grid.load_state_dict(saved)
        api.start()
        yield Server(grid, state, address, http)
        grid.close()


@contextmanager
def light_device(
    server: Server, keys: Keys | None = None, transport: str = "grpc", device: str = ""
) -> Iterator[Link]:
    """Be online as one node."""
    address = server.http if transport == "http" else server.address
    endpoint = Endpoint(address, insecure=True, transport=transport)
    pair, register = keys or generate_keys(), keys is None
    with join(endpoint, pair, StopSignal(), register=register, device=device) as link:
        yield link


def fetch(link: Link, patience: float = 10.0) -> Message:
    """Fetch a node's next message."""
    received = link.receive(patience)
    assert received is not None, "there is no message"
    return received[1]()


def answer(link: Link, message: Message) -> None:
    """Answer a message with its own content."""
    identify_process(message.metadata.run_id, link.node_id)
    link.send(Message(message.content, reply_to=message), 0.1)


def number_of(message: Message) -> int:
    """Return the number in a message or reply."""
    number = message.content["config"]["number"]
    assert isinstance(number, int)
    return number


def round_trip(server: Server, link: Link, number: int) -> None:
    """Check that a node answers a message."""
    sent = server.push(link.node_id, number)
    answer(link, fetch(link))
    assert number_of(server.wait(sent)[0]) == number


@dataclass
class Later:
    """A function that runs in a thread, with a result to wait for."""

    work: Callable[[], object]
    result: object = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.result = self.work()

    def wait(self) -> object:
        """Return the result."""
        self.thread.join(30)
        assert not self.thread.is_alive(), "it takes too long"
        return self.result
