"""A second port, for whoever watches the server: `/healthz` and `/metrics`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from raceme.config.errors import UserError
from raceme.deployment.metrics import CONTENT_TYPE

_SLOWEST_SECONDS = 5.0
"""A caller has so long for its request, and for reading the answer."""

Health = Callable[[], tuple[bool, Mapping[str, object]]]
"""Returns whether all is well, and what is said about it."""


class StatusPort:
    """Answers while it is entered.

    Parameters
    ----------
    address : str
        ``HOST:PORT``.
    page : Callable
        Returns the figures.
    health : Callable
        See `Health`.

    Attributes
    ----------
    address : str
        Where it listens.

    Raises
    ------
    UserError
        The address cannot be listened at.
    """

    def __init__(self, address: str, page: Callable[[], bytes], health: Health) -> None:
        self.address = address
        host, _, port = address.rpartition(":")

        def healthz() -> tuple[int, str, bytes]:
            well, said = health()
            text = json.dumps({"status": "ok" if well else "failing", **said})
            return 200 if well else 503, "application/json", text.encode() + b"\n"

        try:
            self._server = _Server((host.strip("[]"), int(port)), _Handler)
        except OSError as error:
            raise UserError(
                f"{address} cannot be listened at for /metrics: {error.strerror}. Choose another "
                "with --metrics HOST:PORT, or do without: --metrics off."
            ) from None
        self._server.answers = {
            "/metrics": lambda: (200, CONTENT_TYPE, page()),
            "/healthz": healthz,
        }
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> StatusPort:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    answers: Mapping[str, Callable[[], tuple[int, str, bytes]]]

    def handle_error(self, _request: object, _address: object) -> None:
        """Say nothing of callers that break off."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _SLOWEST_SECONDS
    server: _Server
    server_version, sys_version = "raceme", ""

    def do_GET(self) -> None:
        """Answer a request."""
        answer = self.server.answers.get(self.path.partition("?")[0])
        status, kind, body = answer() if answer else (404, "text/plain", b"/metrics, /healthz\n")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, _form: str, *_arguments: object) -> None:
        """Print nothing."""
