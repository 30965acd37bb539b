"""Where simulated clients' work is done.

A message's result depends only on its content and on its client's state, so an executor may work
early, in any order, and side by side; the outcome of a run does not change.
"""

from __future__ import annotations

import traceback
from typing import Protocol

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from raceme import compat
from raceme.simulation.randomness import own_randomness


class Executor(Protocol):
    """Does the work that messages ask for, some time between `submit` and `result`."""

    def submit(self, message: Message, context: Context, due: float) -> None:
        """Take on the work of a message.

        Parameters
        ----------
        message : Message
            What is asked; it is known by its message id from here on, and does not change.
        context : Context
            Of the client that is asked. The ClientApp finds its state as it is when the result is
            asked for: work that was done early, on another state, is done again.
        due : float
            When the result will be asked for, on any clock: work that is due first comes first.
        """
        ...

    def result(self, message_id: str) -> Message:
        """Return the reply to a submitted message, once; wait for it if need be."""
        ...

    def cancel(self, message_id: str) -> None:
        """Drop a submitted message: its device went offline, or nobody wants its reply."""
        ...

    def close(self) -> None:
        """Release what the executor holds."""
        ...


class InProcess:
    """Runs the ClientApp in this process at the moment when the reply is needed.

    Parameters
    ----------
    client_app : ClientApp
        The app that answers messages. An exception in it becomes Flower's error reply.
    seed : int, optional
        See :func:`answer`.
    """

    def __init__(self, client_app: ClientApp, seed: int | None = None) -> None:
        self._client_app = client_app
        self._seed = seed
        self._waiting: dict[str, tuple[Message, Context]] = {}

    def submit(self, message: Message, context: Context, due: float) -> None:
        """Keep the message until its reply is asked for."""
        self._waiting[message.metadata.message_id] = (message, context)

    def result(self, message_id: str) -> Message:
        """Run the ClientApp and return its reply."""
        message, context = self._waiting.pop(message_id)
        return answer(self._client_app, message, context, self._seed)

    def cancel(self, message_id: str) -> None:
        """Drop the message without running anything."""
        self._waiting.pop(message_id, None)

    def close(self) -> None:
        """Drop all that is left."""
        self._waiting.clear()


def answer(
    client_app: ClientApp, message: Message, context: Context, seed: int | None = None
) -> Message:
    """Let a ClientApp answer a message, as a SuperNode would: its exceptions are error replies.

    Parameters
    ----------
    client_app : ClientApp
        The app.
    message : Message
        What is asked; its id is the number of the message.
    context : Context
        Of the client that is asked.
    seed : int, optional
        Decides, with the client and the message, what the app draws from the process's own random
        numbers, for apps that are not known to leave them alone.
    """
    compat.start_now(message)
    try:
        if seed is None:
            reply = client_app(message, context)
        else:
            with own_randomness([seed, context.node_id, int(message.metadata.message_id)]):
                reply = client_app(message, context)
        if not isinstance(reply, Message):
            raise TypeError(f"the ClientApp returned no Message but {reply!r}")
        if reply.metadata.reply_to_message_id != message.metadata.message_id:
            raise ValueError("the ClientApp returned a Message that is no reply to its own")
        return reply
    except Exception as error:
        reason = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        return compat.error_reply(message, compat.CLIENT_APP_RAISED_EXCEPTION, reason)
