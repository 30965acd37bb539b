"""Measure the cost of a call in Python's gRPC, which bounds every server built on it.

    python benchmarks/grpc_calls.py [--bytes 88000] [--clients 200] [--seconds 10] [--json FILE]

Clients, which are threads of other processes as in `many_devices.py`, send a number of bytes and
get them back: from gRPC's threaded server, from the asyncio server, from the asyncio server on
uvloop, and from the asyncio server over one stream per client. All on loopback; CPU seconds of the
server and of the clients are counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np

KINDS = ("threads", "asyncio", "uvloop", "streams")
THREADS = 50
"""Clients per process."""
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def be_server(kind: str, port: int) -> None:
    if kind == "threads":
        server = grpc.server(ThreadPoolExecutor(300), options=_OPTIONS)
        handlers = {"Call": grpc.unary_unary_rpc_method_handler(lambda request, _: request)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", handlers),))
        server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        server.wait_for_termination()
        return
    if kind == "uvloop":
        import uvloop

        asyncio.set_event_loop(uvloop.new_event_loop())
    else:
        asyncio.set_event_loop(asyncio.new_event_loop())
    asyncio.get_event_loop().run_until_complete(_serve(port))


async def _serve(port: int) -> None:
    async def call(request: bytes, _context: object) -> bytes:
        return request

    async def stream(requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    server = grpc.aio.server(options=_OPTIONS)
    handlers = {
        "Call": grpc.unary_unary_rpc_method_handler(call),
        "Stream": grpc.stream_stream_rpc_method_handler(stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def be_clients(kind: str, port: int, count: int, seconds: float, size: int) -> None:
    waits: list[float] = []
    start = time.monotonic()

    def call() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS) as channel:
            body = bytes(size)
            for _ in _turns(channel, kind, body, start + seconds, waits):
                pass

    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"waits": waits, "cpu": time.process_time()}))


def _turns(
    channel: grpc.Channel, kind: str, body: bytes, end: float, waits: list[float]
) -> Iterator[None]:
    if kind != "streams":
        method = channel.unary_unary("/Echo/Call")
        while (begun := time.monotonic()) < end:
            method(body)
            waits.append(time.monotonic() - begun)
            yield
        return
    begun = 0.0

    def requests() -> Iterator[bytes]:
        nonlocal begun
        while (begun := time.monotonic()) < end:
            yield body
            answered.acquire()

    answered = threading.Semaphore(0)
    for _ in channel.stream_stream("/Echo/Stream")(requests()):
        waits.append(time.monotonic() - begun)
        answered.release()
        yield


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _cpu(process_id: int) -> float:
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(kind: str, clients: int, seconds: float, size: int) -> dict[str, Any]:
    port = _free_port()
    command = [sys.executable, __file__, "--kind", kind, "--port", str(port)]
    server = subprocess.Popen([*command, "--be", "server"])
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.1)
        before = _cpu(server.pid)
        sizes = [min(THREADS, clients - first) for first in range(0, clients, THREADS)]
        more = ["--seconds", str(seconds), "--bytes", str(size), "--be", "clients", "--clients"]
        started = [
            subprocess.Popen([*command, *more, str(count)], stdout=subprocess.PIPE)
            for count in sizes
        ]
        results = [json.loads(process.communicate()[0]) for process in started]
        used = _cpu(server.pid) - before
    finally:
        server.kill()
        server.wait()
    waits = [wait for result in results for wait in result["waits"]]
    return {
        "calls_per_second": round(len(waits) / seconds),
        "server_cpu_ms": round(1000 * used / len(waits), 3),
        "clients_cpu_ms": round(1000 * sum(r["cpu"] for r in results) / len(waits), 3),
        "p50_ms": round(1000 * float(np.percentile(waits, 50)), 1),
        "p99_ms": round(1000 * float(np.percentile(waits, 99)), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--bytes", type=int, default=88_000, help="bytes of each call, in each direction"
    )
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    parser.add_argument("--be", choices=["server", "clients"], help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.be == "server":
        be_server(asked.kind, asked.port)
        return
    if asked.be == "clients":
        be_clients(asked.kind, asked.port, asked.clients, asked.seconds, asked.bytes)
        return
    rows = {}
    for kind in KINDS:
        rows[kind] = measure(kind, asked.clients, asked.seconds, asked.bytes)
        print(f"{kind:8}", *(f"{name} {value:>7g}" for name, value in rows[kind].items()))
    if asked.json:
        asked.json.write_text(json.dumps({"bytes": asked.bytes, **rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
