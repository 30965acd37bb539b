"""A bad network for one process: a TCP relay with delay, packet loss and cut connections."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

_SEGMENT = 1448
"""Bytes of data in a TCP segment on Ethernet."""


@dataclass
class BadNetwork:
    """A relay on loopback, in its own thread.

    TCP hides packet loss from its users: a lost packet, and everything behind it, arrives later. So
    a segment that is "lost" here is delayed by the sender's retransmission timeout, and twice as
    long if it is lost again.

    Attributes
    ----------
    target : int
        Port on this machine to which everything is relayed.
    delay : float
        Seconds on the way, in each direction.
    loss : float
        Probability that a segment is lost.
    mean_life : float
        Mean seconds until all connections are cut; 0 for never.
    port : int
        Port on this machine to connect to.
    segments, lost, cuts : int
        Segments relayed, how many times one was lost, connections cut.
    """

    target: int
    delay: float = 0.1
    loss: float = 0.05
    mean_life: float = 0.0
    seed: int = 0
    port: int = 0
    segments: int = 0
    lost: int = 0
    cuts: int = 0
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def open(self) -> None:
        """Listen, and start to cut connections."""
        self._thread.start()
        self._run(self._listen())

    def close(self) -> None:
        """Close everything."""
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def cut(self) -> None:
        """Cut all connections now."""
        self._run(self._cut())

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(5)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        if self.mean_life:
            self._cutter = asyncio.create_task(self._cut_again_and_again())

    async def _end(self) -> None:
        self._server.close()
        if self.mean_life:
            self._cutter.cancel()
        self._abort_all()
        # Drop what is still in transit.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)

    async def _cut_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(self._random.expovariate(1 / self.mean_life))
            await self._cut()

    async def _cut(self) -> None:
        # A connection has two ends, with a writer each.
        self.cuts += len(self._writers) // 2
        self._abort_all()

    def _abort_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._writers |= both
        try:
            await asyncio.gather(self._relay(reader, far_writer), self._relay(far_reader, writer))
        finally:
            self._writers -= both
            for end in both:
                end.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction, in order, until an end closes."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        deliverer = asyncio.create_task(self._deliver(on_the_way, writer))
        arrival = 0.0
        with suppress(OSError):
            while segment := await reader.read(_SEGMENT):
                arrival = max(arrival, self._loop.time() + self.delay + self._retransmission())
                on_the_way.put_nowait((arrival, segment))
        on_the_way.put_nowait((arrival, b""))
        await deliverer

    async def _deliver(
        self, on_the_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while True:
                arrival, segment = await on_the_way.get()
                await asyncio.sleep(arrival - self._loop.time())
                if not segment:
                    break
                writer.write(segment)
                await writer.drain()
        writer.close()

    def _retransmission(self) -> float:
        """Return the delay of a segment that is lost, perhaps repeatedly."""
        self.segments += 1
        # The round trip, and the 200 ms that Linux waits at least beyond it.
        timeout, seconds = 2 * self.delay + 0.2, 0.0
        while self._random.random() < self.loss:
            self.lost += 1
            seconds += timeout
            timeout *= 2
        return seconds


@contextmanager
def bad_network(target: int, **terms: Any) -> Iterator[BadNetwork]:
    """Yield a relay with a bad network to a port on this machine."""
    network = BadNetwork(target, **terms)
    network.open()
    try:
        yield network
    finally:
        network.close()
