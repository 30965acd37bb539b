"""What a worker process does: it answers messages with a ClientApp until it is told to stop."""

from __future__ import annotations

import logging
import signal
import sys
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from operator import attrgetter
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from raceme import compat
from raceme.datasets.torchvision_guard import without_operators
from raceme.simulation.executor import answer
from raceme.simulation.transfer import (
    Node,
    Packed,
    Request,
    Response,
    SharedMemory,
    pack,
    sizes,
    unpack,
)

SENT_TO_ALL = (signal.SIGINT, signal.SIGHUP)
"""Signals that all processes of a terminal get: Ctrl-C, and its end."""


def work(
    connection: Connection[Any, Any], target: str, log_level: int, seed: int | None = None
) -> None:
    """Answer messages until the other end of the connection is closed, or its process ends.

    Parameters
    ----------
    connection : Connection
        To the simulator. What comes first from here is None, or else why there will be nothing
        more. Then there is one :class:`Response` for every :class:`Request`, in the same order.
        A pair of numbers announces shared memory: slots, and bytes per slot.
    target : str
        The ClientApp, as ``module:attribute``.
    log_level : int
        Of Flower's logger.
    seed : int, optional
        See :func:`~raceme.simulation.executor.answer`.
    """
    # The simulator decides what becomes of its processes.
    for number in SENT_TO_ALL:
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("flwr").setLevel(log_level)
    try:
        app = load(target)
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split()) or "no reason given"
        connection.send(f"{type(error).__name__}: {reason}")
        return
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    desk = Desk(app, seed)
    try:
        connection.send(None)
        while True:
            received = connection.recv()
            if isinstance(received, Request):
                connection.send(desk.respond(received))
            else:
                desk.memory = SharedMemory(recv_handle(connection), *received)
    except (EOFError, OSError):
        return


def load(target: str) -> ClientApp:
    """Import a ClientApp.

    Raises
    ------
    Exception
        Whatever the import raises; TypeError if it is no ClientApp.
    """
    module, _, attribute = target.partition(":")
    app = attrgetter(attribute)(without_operators(lambda: import_module(module)))
    if not isinstance(app, ClientApp):
        raise TypeError(f"{target} must be a flwr.clientapp.ClientApp, got {type(app).__name__}")
    return app


class Desk:
    """Where requests become messages, and replies responses.

    Parameters
    ----------
    app : ClientApp
        Answers.
    seed : int or None
        See :func:`~raceme.simulation.executor.answer`.
    """

    def __init__(self, app: ClientApp, seed: int | None) -> None:
        self._app, self._seed = app, seed
        self._nodes: dict[int, Node] = {}
        self.memory: SharedMemory | None = None

    def respond(self, request: Request) -> Response:
        """Answer a request."""
        if request.node is not None:
            self._nodes[request.node_id] = request.node
        state = RecordDict() if request.state is None else unpack(request.state)
        context = _context(request.node_id, self._nodes[request.node_id], state)
        reply = answer(self._app, self._message(request), context, self._seed)
        before = request.state or Packed([], [])
        after = pack(context.state)
        packed = Packed([], []) if reply.has_error() else pack(reply.content)
        fits = self.memory is not None and self.memory.write(request.slot, packed.data)
        return Response(
            message_id=request.message_id,
            error=(reply.error.code, reply.error.reason) if reply.has_error() else None,
            content=packed.records,
            data=None if fits else packed.data,
            state=None if after == before else after,
        )

    def _message(self, request: Request) -> Message:
        data = request.data
        if data is None:
            assert self.memory is not None, "shared memory is sent before it is used"
            data = self.memory.read(request.slot, sizes(request.content))
        compat.identify_process(*request.sender)
        message = Message(
            unpack(Packed(request.content, data)),
            request.node_id,
            request.message_type,
            ttl=request.ttl,
            group_id=request.group_id,
        )
        compat.set_message_id(message, request.message_id)
        return message


def _context(node_id: int, node: Node, state: RecordDict) -> Context:
    return Context(
        run_id=node.run_id,
        node_id=node_id,
        node_config=dict(node.node_config),
        state=state,
        run_config=dict(node.run_config),
    )
