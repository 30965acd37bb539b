"""The dashboard's server: one page, its files, and the run as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from raceme.dashboard.access import Guard
from raceme.dashboard.page import ASSETS, live_page, read_asset

_POLL_SECONDS = 0.25
_BREATH_SECONDS = 15.0
"""A stream without news sends a comment so often, or proxies and laptops think it dead."""
_RETRY_MILLISECONDS = 1000


class Source(Protocol):
    """Something that grows, as pieces of JSON; see :class:`raceme.dashboard.source.RunSource`."""

    pieces: list[str]
    generation: int
    trouble: str

    def poll(self) -> bool:
        """Read what has come; return whether there is more already."""
        ...


class Feed:
    """Reads a source while somebody looks, and lets all of them know.

    Parameters
    ----------
    source : Source
        What is read, in a thread: reading waits for the disk.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._viewers = 0
        self._reader: asyncio.Task[None] | None = None
        self._reading = asyncio.Lock()
        self._news = asyncio.Event()

    @contextmanager
    def viewer(self) -> Iterator[None]:
        """Have the source read meanwhile."""
        self._viewers += 1
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read())
        try:
            yield
        finally:
            self._viewers -= 1

    async def news(self) -> None:
        """Wait until the source has been read once more."""
        await self._news.wait()

    async def read(self) -> bool:
        """Read the source once, and wake whoever waits; return whether there is more already."""
        async with self._reading:
            more = await asyncio.to_thread(self.source.poll)
        self._news.set()
        self._news = asyncio.Event()
        return more

    async def _read(self) -> None:
        while self._viewers:
            more = await self.read()
            await asyncio.sleep(0 if more else _POLL_SECONDS)


class Dashboard:
    """The application.

    Parameters
    ----------
    sources : Callable
        Takes the name of a run in a comparison, empty for the folder itself, and returns its
        source; None if there is no such run.
    host, token : str
        Who may look; see :class:`raceme.dashboard.access.Guard`.
    """

    def __init__(self, sources: Callable[[str], Source | None], host: str, token: str) -> None:
        self._sources = sources
        self._feeds: dict[str, Feed] = {}
        self._closing = False
        self.app = Starlette(
            routes=[
                Route("/", self._page),
                Route("/events", self._events),
                Route("/assets/{name:path}", self._asset),
            ],
            middleware=[Middleware(Guard, host=host, token=token)],
        )

    async def close(self) -> None:
        """Tell all browsers what is left to tell, and that it was the last."""
        for feed in self._feeds.values():
            while await feed.read():
                pass
        self._closing = True
        for feed in self._feeds.values():
            await feed.read()

    async def _page(self, request: Request) -> Response:
        return Response(live_page(), media_type="text/html")

    async def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            return PlainTextResponse("There is no such file.\n", 404)
        return Response(read_asset(name), media_type=ASSETS[name])

    async def _events(self, request: Request) -> Response:
        name = request.query_params.get("run", "")
        feed = self._feed(name)
        if feed is None:
            return PlainTextResponse("There is no such run.\n", 404)
        generation, sent = _seen(request.headers.get("last-event-id", ""))
        return StreamingResponse(
            self._stream(feed, generation, sent), media_type="text/event-stream"
        )

    def _feed(self, name: str) -> Feed | None:
        if name not in self._feeds:
            source = self._sources(name)
            if source is None:
                return None
            self._feeds[name] = Feed(source)
        return self._feeds[name]

    async def _stream(self, feed: Feed, generation: int, sent: int) -> AsyncIterator[str]:
        """Yield a source's pieces from one on, and go on as they come.

        A browser that does not read makes this wait, and nobody else.
        """
        source, trouble, silent = feed.source, "", 0.0
        yield f"retry: {_RETRY_MILLISECONDS}\n\n"
        with feed.viewer():
            while True:
                closing = self._closing
                if generation != source.generation:
                    generation, sent = source.generation, 0
                    yield _event("restart", "{}", generation, sent)
                while sent < len(source.pieces) and generation == source.generation:
                    sent += 1
                    silent = 0.0
                    yield _event("piece", source.pieces[sent - 1], generation, sent)
                if source.trouble != trouble:
                    trouble = source.trouble
                    yield _event("trouble", json.dumps({"text": trouble}), generation, sent)
                if closing:
                    break
                try:
                    await asyncio.wait_for(feed.news(), _BREATH_SECONDS)
                    silent += _POLL_SECONDS
                except TimeoutError:
                    silent = _BREATH_SECONDS
                if silent >= _BREATH_SECONDS:
                    silent = 0.0
                    yield ": \n\n"
            yield _event("closed", "{}", generation, sent)


def _seen(text: str) -> tuple[int, int]:
    """Return the generation and the number of pieces that a browser has seen."""
    generation, _, sent = text.partition("-")
    if generation.isdecimal() and sent.isdecimal():
        return int(generation), int(sent)
    return 0, 0


def _event(name: str, data: str, generation: int, sent: int) -> str:
    return f"event: {name}\nid: {generation}-{sent}\ndata: {data}\n\n"
