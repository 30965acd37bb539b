"""The asynchronous event loop: everything but the algorithm."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from logging import INFO, getLogger
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from raceme import events
from raceme import messages as names
from raceme.strategies.conduct import Conduct, Rest, go_on, push_one
from raceme.strategies.evaluation import score_from
from raceme.strategies.idle import Idle
from raceme.strategies.model import Applied
from raceme.strategies.packing import training_message
from raceme.strategies.plan import Plan
from raceme.strategies.replies import InvalidReplyError, Task, Update, read_update
from raceme.strategies.reports import applied_update, joined

log = getLogger("raceme")

_FLEET_CHECK_SECONDS = 5.0
"""How often the list of online nodes is looked at while replies keep coming."""
_REST_SECONDS = (0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 60.0)
"""Pause of a client before it is given work again, after 1, 2, … replies in a row of no use."""


class AsyncStrategy(Conduct, Strategy):
    """Acts on every update the moment it arrives: the base of the asynchronous methods.

    It keeps the online clients busy, checks replies, counts versions, gives work again after an
    error, notices who comes and goes, evaluates on schedule and stops. A subclass adds the method:
    what to do with one update, and which model a client gets next (see `Method`). It runs
    unchanged on any Flower ``Grid``.

    Parameters
    ----------
    parameters : dataclass, optional
        Hyper-parameters; by default the class's `parameters_type`, made without arguments.
    seed : int
        Decides whatever the method leaves to chance.
    """

    def __init__(self, parameters: Any = None, seed: int = 0) -> None:
        super().__init__(parameters, seed)
        self._train_config = ConfigRecord()
        self._idle = Idle()
        self._drafts: dict[int, Task] = {}
        self._last_refusal = ""

    @abstractmethod
    def on_update(self, update: Update) -> Applied:
        """Do what the method does with one valid update."""

    # The event loop.

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
        """Run until a limit is reached, nobody is left, or the user interrupts.

        A strategy that has run before, or was given a state, goes on from there: everybody is
        greeted again, and tasks that were open then are given up; unless the grid was brought
        back to its own state of that moment, which goes on as if nothing had happened.

        Parameters
        ----------
        grid : Grid
            Any Flower grid.
        initial_arrays : ArrayRecord
            The initial model; its names and shapes are those of every model of the run.
        num_rounds : int
            Number of asynchronous rounds; one is one update applied.
        timeout : float
            Seconds after which an unanswered task is lost, and after which a run without any
            client ends.
        train_config, evaluate_config : ConfigRecord, optional
            Sent along with every training and every evaluation message.
        evaluate_fn : Callable, optional
            Called at every evaluation with the number of updates and the models' arrays.
        plan : Plan, optional
            Further limits, evaluation schedule and concurrency.
        observe : Observer
            Called with everything that happens.
        at_rest : Rest
            Called between two steps, when `state_dict` is whole. What it returns, unless it is
            empty, ends the run.

        Returns
        -------
        Result
            `arrays` holds the final model; with several clusters their names are
            ``<cluster>/<array>``. Evaluations are listed by number of updates.
        """
        missed_nothing = self._prepare(
            grid, initial_arrays, num_rounds, timeout, plan, observe, at_rest
        )
        self._train_config = train_config or ConfigRecord()
        result = Result()

        def evaluate() -> None:
            metrics = self._evaluate(grid, evaluate_config or ConfigRecord())
            if metrics is not None:
                result.evaluate_metrics_clientapp[self.progress.updates] = metrics
            central = evaluate_fn and evaluate_fn(
                self.progress.updates, self._packer.pack_all(self.models)
            )
            if central:
                result.evaluate_metrics_serverapp[self.progress.updates] = central

        try:
            if not missed_nothing:
                self.progress.checked_at = self.progress.somebody_at = self._clock.now()
                self._refresh(grid)
            ended_at = self._loop(grid, num_rounds, evaluate)
        except KeyboardInterrupt:
            self._reason, ended_at = "interrupted by the user", self._clock.now()
        log.log(INFO, "The run ended after %d updates: %s", self.progress.updates, self._reason)
        self._observe(events.RunEnded(ended_at, self.progress.updates, self._reason))
        result.arrays = self._packer.pack_all(self.models)
        return result

    def _disconnect(self) -> None:
        """Forget nodes, open tasks and who is idle."""
        super()._disconnect()
        self._idle.clear()

    def _loop(self, grid: Grid, num_updates: int, evaluate: Callable[[], None]) -> float:
        """Dispatch, wait, apply, evaluate, until something ends it; return when that was."""
        progress, clock = self.progress, self._clock
        while True:
            if self._is_over(num_updates, evaluate):
                break
            self._reason = self._at_rest()
            if self._reason:
                break
            messages = self.configure_train(
                progress.updates, ArrayRecord(), self._train_config, grid
            )
            self._push(grid, messages)
            ready_at = self._idle.next_ready(clock.now())
            until = min(progress.checked_at + _FLEET_CHECK_SECONDS, self._plan.deadline, ready_at)
            replies = clock.wait(self._open_ids(), until)
            for reply in replies:
                # Several may have come at once; a limit holds and evaluations are due all the same.
                self.aggregate_train(progress.updates, [reply])
                if self._is_over(num_updates, evaluate):
                    break
            if progress.fleet.by_node:
                progress.somebody_at = clock.now()
            if not replies or clock.now() >= progress.checked_at + _FLEET_CHECK_SECONDS:
                self._refresh(grid)
                progress.checked_at = clock.now()
                alone_since = progress.somebody_at
                if not progress.fleet.by_node and clock.now() >= alone_since + self._ttl:
                    self._reason = "all clients are gone"
                    return alone_since
        if progress.evaluated_at != progress.updates and progress.fleet.by_node:
            evaluate()
        return clock.now()

    def _is_over(self, num_updates: int, evaluate: Callable[[], None]) -> bool:
        """Evaluate if that is due; return whether a limit is reached, and note which."""
        progress = self.progress
        if self._evaluation_is_due():
            evaluate()
        useless = max(100, 10 * len(progress.fleet.clients))
        if not self._reason:
            self._reason = self._plan.limit(progress.updates, num_updates, self._clock.now())
        if not self._reason and progress.rejected_in_a_row >= useless:
            self._reason = (
                f"the last {progress.rejected_in_a_row} replies were of no use; the last one: "
                f"{self._last_refusal}"
            )
        return bool(self._reason)

    def _refresh(self, grid: Grid) -> None:
        """Notice who came and who left; greet the new nodes."""
        fleet = self.progress.fleet
        arrived, left = fleet.changes(grid.get_node_ids())
        for client in left:
            self._idle.remove(client)
            self.remove_client(client)
            self._observe(events.ClientLeft(self._clock.now(), client))
        for node in arrived:
            greeting = Message(RecordDict(), node, MessageType.QUERY, ttl=self._ttl)
            message_id = push_one(grid, greeting)
            if message_id:
                fleet.greeted[node] = message_id

    def _open_ids(self) -> Collection[str]:
        """Return the ids of all messages without an answer."""
        in_flight, greeted = self.progress.in_flight.keys(), self.progress.fleet.greeted
        return in_flight | set(greeted.values()) if greeted else in_flight

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides how the run goes on; see the base class."""
        loop = {"idle": self._idle.names(), "last-refusal": self._last_refusal}
        return {**super().state_dict(), "loop": loop}

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Continue from a state; see the base class."""
        super().load_state_dict(tree)
        self._idle.clear()
        for name in tree["loop"]["idle"]:
            self._idle.add(self.progress.fleet.clients[name])
        self._last_refusal = tree["loop"]["last-refusal"]

    # Handing work out.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Make the training messages for all clients that should be given work now.

        Parameters
        ----------
        server_round : int
            Updates applied so far.
        arrays : ArrayRecord
            Not used: each client gets its own cluster's model.
        config : ConfigRecord
            The run's training settings.
        grid : Grid
            Not used.
        """
        made = []
        for client in self._idle.take(self._clock.now(), self._free_places(), self.rng):
            assert client.node_id is not None, "only clients that are online are idle"
            task, arrays_down = self._parcel(client.client_id)
            settings: dict[str, Any] = {
                **config,
                names.EVALUATE_FIRST: not self._clock.free_evaluation,
                **self.train_config(client.client_id),
            }
            made.append(training_message(task, client.node_id, arrays_down, settings, self._ttl))
            self._drafts[task.number] = task
            self.on_dispatch(task)
        return made

    def _free_places(self) -> int | None:
        """Return how many more clients may be given work; None stands for all."""
        if not self._plan.concurrency:
            return None
        # Who went offline with a task trains no more: it must not keep the others from working.
        clients, open_tasks = self.progress.fleet.clients, self.progress.in_flight.values()
        busy = sum(clients[task.client].node_id is not None for task in open_tasks)
        return self._plan.concurrency - busy

    def _push(self, grid: Grid, made: Iterable[Message]) -> None:
        """Send training messages, and remember who has which task."""
        for message in made:
            task = self._drafts.pop(
                cast(int, message.content.config_records[names.CONFIG][names.TASK])
            )
            message_id = push_one(grid, message)
            if message_id:
                self.progress.in_flight[message_id] = task
            else:
                self._refuse(task, "the message could not be sent")

    # Taking replies in.

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Act on replies, one by one, in order of arrival.

        Parameters
        ----------
        server_round : int
            Updates applied before.
        replies : Iterable[Message]
            Replies to training messages and to greetings.

        Returns
        -------
        tuple[None, None]
            There is no single model, and metrics are reported per update.
        """
        greeted = {key: node for node, key in self.progress.fleet.greeted.items()}
        for reply in replies:
            message_id = reply.metadata.reply_to_message_id
            if message_id in greeted:
                self._introduce(greeted[message_id], reply)
                continue
            task = self.progress.in_flight.pop(message_id, None)
            if task is None:
                log.warning("A reply to an unknown or already answered message was ignored.")
                self.progress.rejected += 1
                continue
            try:
                update = read_update(reply, task, self._spec)
            except InvalidReplyError as error:
                self._refuse(task, str(error))
            else:
                self._accept(update)
        return None, None

    def _introduce(self, node_id: int, reply: Message) -> None:
        """Welcome the client that answered a greeting, and let it have work."""
        introduced = self.progress.fleet.introduce(node_id, reply)
        now = self._clock.now()
        if isinstance(introduced, str):
            log.warning("A client is refused: %s", introduced)
            self._observe(events.UpdateRejected(now, f"node {node_id}", introduced, now))
            return
        client, returned = introduced
        open_tasks = self.progress.in_flight.items()
        for message_id in [key for key, task in open_tasks if task.client == client.client_id]:
            # It was away: what it was working on is lost, or comes too late to wait for.
            self._refuse(self.progress.in_flight.pop(message_id), "the client went offline with it")
        client.failures, client.ready_at = 0, now
        self.add_client(client)
        self._idle.add(client)
        self._observe(joined(now, client, returned))

    def _accept(self, update: Update) -> None:
        """Apply a valid update and let its client have work again."""
        task, progress = update.task, self.progress
        applied = self.on_update(update)
        self.on_close(task)
        progress.updates += 1
        progress.rejected_in_a_row = 0
        score = score_from(update.metrics, task.cluster)
        if score is not None:
            progress.scores[task.client] = score
        client = progress.fleet.clients[task.client]
        client.failures = 0
        if client.node_id is not None:
            self._idle.add(client)
        self._observe(applied_update(self._clock.now(), progress.updates, update, applied))

    def _refuse(self, task: Task, reason: str) -> None:
        """Count and report a reply of no use; its client rests longer each time in a row."""
        self.on_close(task)
        now, client = self._clock.now(), self.progress.fleet.clients[task.client]
        self.progress.rejected += 1
        self.progress.rejected_in_a_row += 1
        self._last_refusal = f"{task.client}: {reason}"
        log.warning("The update of %s was rejected: %s", task.client, reason)
        self._observe(events.UpdateRejected(now, task.client, reason, task.sent_at))
        client.ready_at = now + _REST_SECONDS[min(client.failures, len(_REST_SECONDS) - 1)]
        client.failures += 1
        if client.node_id is not None:
            self._idle.add(client)

    # Evaluation.

    def _evaluation_is_due(self) -> bool:
        """Return whether to evaluate before anything else happens."""
        progress = self.progress
        if progress.evaluated_at < 0:
            # Where a sweep is free it waits for the first greetings, to include everybody.
            return bool(progress.fleet.clients) and not progress.fleet.greeted
        return progress.updates - progress.evaluated_at >= self._plan.eval_every

    def _evaluate(self, grid: Grid, config: ConfigRecord) -> MetricRecord | None:
        """Sweep over all clients where that is free; else average what they last reported."""
        self.progress.evaluated_at = self.progress.updates
        if not self._clock.free_evaluation:
            return self._report(self.progress.scores)
        sweep = self.configure_evaluate(self.progress.updates, ArrayRecord(), config, grid)
        return self.aggregate_evaluate(self.progress.updates, grid.send_and_receive(sweep))
