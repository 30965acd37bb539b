"""The loop over rounds, on the same clock and with the same limits and reports as the others.

A round sends models to the clients that take part, waits for all of them (so that it lasts as long
as the slowest) and lets the method aggregate. Unlike `Strategy.start` it takes each reply when it
arrives, so that a report shows who waited for whom, checks it, counts updates, and stops where the
asynchronous methods stop.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from logging import INFO, getLogger
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from raceme import events
from raceme import messages as names
from raceme.options import option
from raceme.strategies.conduct import Conduct, Rest, go_on, push_one
from raceme.strategies.fleet import Client
from raceme.strategies.model import Applied
from raceme.strategies.plan import Plan
from raceme.strategies.replies import InvalidReplyError, Task, Update, read_update
from raceme.strategies.reports import applied_update, joined

log = getLogger("raceme")

_FLEET_CHECK_SECONDS = 5.0
"""How often to look whether a client has come online while there is none."""
_GREETING_SECONDS = 60.0
"""How long a round waits for new nodes to answer their greeting."""
_USELESS_ROUNDS = 10
"""Rounds in a row without a valid update that end the run."""


@dataclass(frozen=True)
class RoundsParameters:
    """What every round-based method can be told."""

    fraction: float = option(
        1.0, "share of the online clients that train in a round", above=0, high=1
    )


class Rounds(Conduct, Strategy):
    """Waits for the clients of a round, then acts on all updates: the base of such methods.

    A subclass adds the method: what to do with the updates of a round, and which model a client
    gets next (see `Method`). It runs unchanged on any Flower ``Grid``.

    Parameters
    ----------
    parameters : RoundsParameters, optional
        Hyper-parameters; by default the class's `parameters_type`, made without arguments.
    seed : int
        Decides who takes part in a round, and whatever the method leaves to chance.
    """

    parameters: RoundsParameters

    def __init__(self, parameters: Any = None, seed: int = 0) -> None:
        super().__init__(parameters, seed)
        self._drafts: dict[int, Task] = {}
        self._valid: dict[str, tuple[Update, float]] = {}
        self._held: list[events.Event] | None = None

    @abstractmethod
    def aggregate(self, updates: Sequence[Update]) -> Sequence[Applied]:
        """Do what the method does with the valid updates of a round, in order of arrival.

        Returns
        -------
        Sequence[Applied]
            What became of each of them.
        """

    def participants(self) -> list[Client]:
        """Return the clients that take part in the next round."""
        return self._sample(int(self.parameters.fraction * len(self.progress.fleet.by_node)))

    def _sample(self, count: int) -> list[Client]:
        """Draw clients that are online, at least one, in order of greeting."""
        online = self.progress.fleet.online()
        if count >= len(online):
            return online
        drawn = self.rng.permutation(len(online))[: max(1, count)]
        return [online[index] for index in sorted(drawn)]

    # The loop over rounds.

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 500,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        *,
        plan: Plan | None = None,
        observe: events.Observer = events.ignore,
        at_rest: Rest = go_on,
    ) -> Result:
        """Run rounds until a limit is reached; as :meth:`AsyncStrategy.start`.

        `num_rounds` counts client updates, so that it means the same for every method: with 40
        clients a round is 40 of them. The round in which the limit falls is completed.
        """
        if not self._prepare(grid, initial_arrays, num_rounds, timeout, plan, observe, at_rest):
            self.progress.useless_rounds = 0
        result = Result()
        config = evaluate_config or ConfigRecord()

        def evaluate() -> None:
            updates, arrays = self.progress.updates, self._packer.pack_all(self.models)
            self.progress.evaluated_at = updates
            sweep = self.configure_evaluate(updates, arrays, config, grid)
            metrics = self.aggregate_evaluate(
                updates, grid.send_and_receive(sweep, timeout=timeout)
            )
            if metrics is not None:
                result.evaluate_metrics_clientapp[updates] = metrics
            central = evaluate_fn and evaluate_fn(updates, arrays)
            if central:
                result.evaluate_metrics_serverapp[updates] = central

        try:
            ended_at = self._loop(grid, train_config or ConfigRecord(), evaluate, result)
        except KeyboardInterrupt:
            self._reason, ended_at = "interrupted by the user", self._clock.now()
        log.log(INFO, "The run ended after %d updates: %s", self.progress.updates, self._reason)
        self._observe(events.RunEnded(ended_at, self.progress.updates, self._reason))
        result.arrays = self._packer.pack_all(self.models)
        return result

    def _loop(
        self, grid: Grid, config: ConfigRecord, evaluate: Callable[[], None], result: Result
    ) -> float:
        """Greet, evaluate, train and aggregate until a limit is reached; return when that was."""
        progress, clock = self.progress, self._clock
        while True:
            self._reason = self._at_rest()
            if self._reason:
                break
            somebody_at = clock.now()
            while not self._greet(grid):
                clock.wait([], until=min(clock.now() + _FLEET_CHECK_SECONDS, self._plan.deadline))
                self._reason = self._limit()
                if self._reason:
                    return clock.now()
                if clock.now() >= somebody_at + self._ttl:
                    self._reason = "all clients are gone"
                    return somebody_at
            evaluated_at = progress.evaluated_at
            if evaluated_at < 0 or progress.updates - evaluated_at >= self._plan.eval_every:
                evaluate()
            self._reason = self._reason or self._limit()
            if not self._reason and progress.useless_rounds >= _USELESS_ROUNDS:
                self._reason = f"the last {progress.useless_rounds} rounds brought no valid update"
            if self._reason:
                break
            progress.rounds += 1
            replies = self._round(grid, config)
            if replies:
                _, metrics = self.aggregate_train(progress.rounds, replies)
                if metrics is not None:
                    result.train_metrics_clientapp[progress.rounds] = metrics
            progress.useless_rounds = 0 if replies else progress.useless_rounds + 1
        if progress.evaluated_at != progress.updates:
            evaluate()
        return clock.now()

    def _limit(self) -> str:
        """Return which limit is reached, in words; empty if none is."""
        return self._plan.limit(self.progress.updates, self.planned_updates, self._clock.now())

    def _greet(self, grid: Grid) -> bool:
        """Greet new nodes and wait for their answers; return whether anybody is online."""
        fleet, now = self.progress.fleet, self._clock.now()
        arrived, left = fleet.changes(grid.get_node_ids())
        for client_id in left:
            self.remove_client(client_id)
            self._observe(events.ClientLeft(now, client_id))
        greetings = [
            Message(RecordDict(), node, MessageType.QUERY, ttl=self._ttl) for node in arrived
        ]
        for reply in grid.send_and_receive(greetings, timeout=_GREETING_SECONDS):
            node = reply.metadata.src_node_id
            introduced = fleet.introduce(node, reply)
            if isinstance(introduced, str):
                log.warning("A client is refused: %s", introduced)
                self._observe(events.UpdateRejected(now, f"node {node}", introduced, now))
                continue
            client, returned = introduced
            self.add_client(client)
            self._observe(joined(now, client, returned))
        return bool(fleet.by_node)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Make the messages of a round.

        Like those of Flower's own strategies they carry the number of the round and no number of
        a task, so that with one seed a client trains alike under all round-based methods.

        Parameters
        ----------
        server_round : int
            Number of the round, from 1.
        arrays : ArrayRecord
            Not used: each client gets its own cluster's model.
        config : ConfigRecord
            The run's training settings.
        grid : Grid
            Not used.
        """
        made = []
        for client in self.participants():
            assert client.node_id is not None, "only clients that are online take part"
            task, arrays_down = self._parcel(client.client_id)
            settings: dict[str, Any] = {
                **config,
                names.ROUND: server_round,
                **self.train_config(client.client_id),
            }
            content = RecordDict({**arrays_down, names.CONFIG: ConfigRecord(settings)})
            made.append(Message(content, client.node_id, MessageType.TRAIN, ttl=self._ttl))
            self._drafts[client.node_id] = task
        return made

    def _round(self, grid: Grid, config: ConfigRecord) -> list[Message]:
        """Send the messages of a round, and wait; return the valid replies in order of arrival."""
        clock, deadline = self._clock, self._clock.now() + self._ttl
        tasks, replies = self._send(grid, config), []
        self._valid = {}
        while tasks and clock.now() < deadline:
            for reply in clock.wait(tasks, deadline):
                message_id = reply.metadata.reply_to_message_id
                task = tasks.pop(message_id)
                try:
                    update = read_update(reply, task, self._spec)
                except InvalidReplyError as error:
                    self._refuse(task, str(error))
                else:
                    self._valid[message_id] = (update, clock.now())
                    replies.append(reply)
        for task in tasks.values():
            self._refuse(task, "no reply before the timeout")
        return replies

    def _send(self, grid: Grid, config: ConfigRecord) -> dict[str, Task]:
        """Send the messages of a round; return the tasks by message id."""
        tasks: dict[str, Task] = {}
        arrays = self._packer.pack_all(self.models)
        for message in self.configure_train(self.progress.rounds, arrays, config, grid):
            task = self._drafts.pop(message.metadata.dst_node_id)
            self.on_dispatch(task)
            message_id = push_one(grid, message)
            if message_id:
                tasks[message_id] = task
            else:
                self._refuse(task, "the message could not be sent")
        return tasks

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the method act on the valid replies of a round, and report each update.

        Returns
        -------
        tuple[None, None]
            There may be several models, and metrics are reported per update.
        """
        arrived = [self._valid.pop(reply.metadata.reply_to_message_id) for reply in replies]
        # What the method reports comes after the updates that gave rise to it.
        self._held = []
        applied = self.aggregate([update for update, _ in arrived])
        for (update, arrived_at), what in zip(arrived, applied, strict=True):
            self.progress.updates += 1
            self._observe(applied_update(arrived_at, self.progress.updates, update, what))
            self.on_close(update.task)
        held, self._held = self._held, None
        for event in held:
            self._observe(event)
        return None, None

    def _emit(self, event: events.Event) -> None:
        """Report something, after the updates of the round if it is in the midst of one."""
        if self._held is None:
            self._observe(event)
        else:
            self._held.append(event)

    def _refuse(self, task: Task, reason: str) -> None:
        self.on_close(task)
        self.progress.rejected += 1
        log.warning("The update of %s was rejected: %s", task.client, reason)
        self._observe(events.UpdateRejected(self._clock.now(), task.client, reason, task.sent_at))
