"""Notices of a server to its operator, by a webhook, about events that need attention."""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import Queue

import httpx

from raceme.core.errors import one_line, plural
from raceme.core.events import Evaluated, EventHandler, RunEnded

log = logging.getLogger("raceme.serve")

_LOOK_SECONDS = 10.0
_GONE_SECONDS = 300.0
"""Time for which half of the devices are offline before a notice."""
_FALL = 0.1
"""Loss of the best result, as a share of it, from which on there is a notice."""
_LEAST_FREE = 500 << 20
_DAYS_LEFT = timedelta(days=14)
_SEND_SECONDS, _TRIES = 10.0, 3


class Webhook:
    """Posts notices as JSON, in a thread of its own: ``text``, ``event``, ``run`` and ``time``.

    Parameters
    ----------
    url : str
        Address of the webhook.
    run : Path
        Folder of the run, which notices state.
    """

    def __init__(self, url: str, run: Path) -> None:
        self._url, self._run = url, str(run)
        self._queue: Queue[dict[str, str] | None] = Queue()
        self._thread = threading.Thread(target=self._send_all, daemon=True)
        self._thread.start()

    def __call__(self, event: str, text: str) -> None:
        """Send a notice."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        said = {"text": f"{self._run}: {text}", "event": event, "run": self._run, "time": now}
        self._queue.put(said)

    def close(self) -> None:
        """Wait until all notices are sent, or given up."""
        self._queue.put(None)
        self._thread.join(_TRIES * 2 * _SEND_SECONDS)

    def _send_all(self) -> None:
        while (said := self._queue.get()) is not None:
            for left in reversed(range(_TRIES)):
                try:
                    httpx.post(self._url, json=said, timeout=_SEND_SECONDS).raise_for_status()
                    break
                except (httpx.HTTPError, httpx.InvalidURL) as error:
                    if not left:
                        log.warning("A notice could not be sent: %s", one_line(error))
                    else:
                        time.sleep(1.0)


class Notices(EventHandler):
    """Sends one notice at the start of each problem. An observer of the run's events.

    Parameters
    ----------
    send : Callable
        Takes the name of an event and a text.
    run : Path
        Folder of the run.
    online : Callable
        Returns the number of devices that are online.
    certificate_until : Callable
        Returns the time at which the server's certificate expires; None without one.
    clock : Callable
        Monotonic, in seconds; replaceable for tests.
    """

    def __init__(
        self,
        send: Callable[[str, str], None],
        run: Path,
        online: Callable[[], int],
        certificate_until: Callable[[], datetime | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send, self._run, self._online = send, run, online
        self._until, self._clock = certificate_until, clock
        self._looked_at = float("-inf")
        self._best: float | None = None
        self._most = 0
        self._fewer_since: float | None = None
        self._reported: set[str] = set()

    def on_evaluated(self, event: Evaluated) -> None:
        """Send a notice if results are a tenth worse than the best so far."""
        score, measure = event.accuracy, event.measure
        if not math.isfinite(score):
            return
        best = score if self._best is None else self._best
        is_error = measure.is_error
        self._best = min(best, score) if is_error else max(best, score)
        is_worse = score > (1 + _FALL) * best if is_error else score < (1 - _FALL) * best
        change = "rose" if is_error else "fell"
        text = f"{measure.label} {change} to {measure.shown(score)}, its best was "
        self._report("accuracy-fell", is_worse, text + measure.shown(best))

    def on_run_ended(self, event: RunEnded) -> None:
        """Send a notice that the run has ended."""
        self._send(
            "run-ended", f"the run ended after {plural(event.updates, 'update')}: {event.reason}"
        )

    def stopped(self, reason: str) -> None:
        """Send a notice that the server has stopped with an error."""
        self._send("run-ended", f"the server has stopped: {reason}")

    def check(self) -> bool:
        """Check devices, disk and certificate, in the method's thread; return False."""
        now = self._clock()
        if now < self._looked_at + _LOOK_SECONDS:
            return False
        self._looked_at = now
        online = self._online()
        self._most = max(self._most, online)
        if 2 * online > self._most or not self._most:
            self._fewer_since = None
        elif self._fewer_since is None:
            self._fewer_since = now
        gone = self._fewer_since is not None and now >= self._fewer_since + _GONE_SECONDS
        self._report("devices-gone", gone, f"{online} of {self._most} devices are online")
        with suppress(OSError):
            free = shutil.disk_usage(self._run).free
            self._report("disk-full", free < _LEAST_FREE, f"the disk has {free >> 20} MiB left")
        until = self._until()
        ends = until is not None and until < datetime.now(UTC) + _DAYS_LEFT
        text = f"the server's certificate expires on {until:%Y-%m-%d}" if until else ""
        self._report("certificate-expires", ends, text)
        return False

    def _report(self, event: str, is_so: bool, text: str) -> None:
        """Send a notice when a problem begins."""
        if is_so and event not in self._reported:
            self._send(event, text)
        if is_so:
            self._reported.add(event)
        else:
            self._reported.discard(event)
