"""The grid as the ServerApp of any Flower app finds it: it may poll, pause and never return."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from flwr.app import Message
from flwr.clientapp import ClientApp

from raceme.apps.halted import Halted
from raceme.compat import app as compat
from raceme.config.errors import UserError
from raceme.protocol.exchange import ExchangeObserver
from raceme.simulation import Executor, Node, VirtualGrid
from raceme.simulation.workload import Cost, training_cost

Value = str | int | float | bool

_MOST_ASKS, _MOST_ASKS_OF_CHANGING = 1_000, 100_000
"""So often in a row a ServerApp may ask for what cannot come: of a fleet that stays as it is, and
of one whose clients come and go."""
_SAME_MOMENT = 100
"""Who asks for the nodes more often than this without a pause wants time to pass."""


class AppGrid(VirtualGrid):
    """A virtual grid for ServerApps that were written for the wall clock.

    `send_and_receive` moves the clock to the last reply. `pull_messages` returns what is there and
    leaves the clock alone, so that an app that pauses between two looks sees what it would see on
    real devices; asked again at the same moment, it moves the clock to the next reply, so that
    an app that looks without a pause gets on. A client that goes offline is missed after a minute,
    as by Flower's SuperLink.

    Parameters
    ----------
    client_app, nodes, run_config, seed, executor, cost, observe
        See :class:`~raceme.simulation.VirtualGrid`.
    max_time : float
        Virtual time in seconds at which the ServerApp is ended.
    free_evaluation : bool
        Whether evaluation costs no time.

    Attributes
    ----------
    is_working : bool
        Whether a call of this grid is under way: what happens in it is not the ServerApp's.
    """

    def __init__(
        self,
        client_app: ClientApp,
        nodes: Sequence[Node],
        run_config: Mapping[str, Value] | None = None,
        seed: int = 0,
        executor: Executor | None = None,
        cost: Cost = training_cost,
        observe: ExchangeObserver | None = None,
        max_time: float = math.inf,
        free_evaluation: bool = True,
    ) -> None:
        super().__init__(
            *(client_app, nodes, run_config, seed, executor, cost, observe),
            notice=compat.MISSED_AFTER,
        )
        self.free_evaluation = free_evaluation
        self.max_time = max_time
        self.thread = threading.get_ident()
        self._depth = 0
        # When replies were last asked for in vain; how often in a row, and the nodes likewise.
        self._looked_at = -math.inf
        self._vain, self._same_moment = 0, 0

    @property
    def is_working(self) -> bool:
        """Whether a call of this grid is under way."""
        return self._depth > 0

    @property
    def is_still(self) -> bool:
        """Whether nothing will ever happen again unless messages are sent."""
        return not self._queue

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; each starts its way to its node at the present time."""
        # The app makes them while they are gone through: that is not this grid's work.
        messages = list(messages)
        with self._work():
            if messages:
                self._get_on()
            return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there; asked twice at one moment, wait for the next ones."""
        wanted = set(message_ids)
        with self._work():
            # What takes no time is there at once.
            self.pass_time(0.0)
            coming = any(self._is_coming(key) for key in wanted)
            if coming and self._looked_at == self.now() and not self._ready(wanted):
                self._move_to_reply(wanted)
            replies = [self._arrived.pop(key)[1] for key in self._ready(wanted)]
            if replies or coming:
                self._get_on()
            else:
                self._ask_in_vain("for replies")
            self._looked_at = self.now()
            return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and move the clock until all are answered, or by `timeout` seconds."""
        messages = list(messages)
        with self._work():
            self._get_on()
            left = self.max_time - self.now()
            if min(left, math.inf if timeout is None else timeout) < left or left == math.inf:
                return super().send_and_receive(messages, timeout=timeout)
            replies = list(super().send_and_receive(messages, timeout=left))
            if len(replies) < len(messages):
                raise self._out_of_time()
            return replies

    def wait(self, message_ids: Collection[str], until: float | None = None) -> list[Message]:
        """Move the clock to the next reply; see :class:`~raceme.simulation.VirtualGrid`."""
        with self._work():
            self._get_on()
            if self.max_time == math.inf:
                return super().wait(message_ids, until)
            end = self.max_time if until is None else min(until, self.max_time)
            replies = super().wait(message_ids, end)
            if not replies and self.now() >= self.max_time:
                raise self._out_of_time()
            return replies

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that are online now."""
        with self._work():
            if not self._pending:
                self._ask_in_vain("which clients are online")
                self._same_moment += 1
                if self._same_moment > _SAME_MOMENT:
                    super().wait(())
            return super().get_node_ids()

    def pause(self, seconds: float) -> None:
        """Let the ServerApp pause: the clock moves on."""
        with self._work():
            self._same_moment = 0
            # The limit, not what lies beyond it, is where the run ends.
            self.pass_time(min(max(0.0, seconds), max(0.0, self.max_time - self.now())))
            if self.now() >= self.max_time:
                raise self._out_of_time()

    def _get_on(self) -> None:
        """Note that the ServerApp does something that may bring it on."""
        self._looked_at = -math.inf
        self._vain = self._same_moment = 0

    @contextmanager
    def _work(self) -> Iterator[None]:
        """Do a call of the ServerApp's, which is over at the limit of time at the latest."""
        if threading.get_ident() != self.thread:
            raise UserError(
                "The ServerApp uses its grid from several threads: on virtual time it can only "
                "be used from the one that main(grid, context) is called in."
            )
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _out_of_time(self) -> Halted:
        return Halted(
            f"the ServerApp had not returned at {self.max_time:g} s of virtual time (--max-time)"
        )

    def _move_to_reply(self, wanted: set[str]) -> None:
        """Move the clock to the next of some replies, and to all that come with it."""
        found = self._advance(wanted, self.max_time, stop_on_switch=False)
        if not found:
            raise self._out_of_time()
        for reply in found:
            self._keep(reply.metadata.reply_to_message_id, reply)
        self.pass_time(0.0)

    def _ask_in_vain(self, what: str) -> None:
        """Count how often in a row the ServerApp has asked for what cannot come.

        Raises
        ------
        Halted
            It has done so too often.
        """
        self._vain += 1
        most = _MOST_ASKS if self.is_still else _MOST_ASKS_OF_CHANGING
        if self._vain > most:
            raise Halted(
                f"the ServerApp would never return: it has asked {self._vain - 1:,} times in a row "
                f"{what}, and no client has anything to do"
            )
