"""The loop: everything that is not the algorithm, for every method alike.

It greets clients, gives them work, checks replies, counts updates, notices who comes and goes,
gives up what is lost, evaluates on schedule and stops. It holds a method and asks it: who works
now, and what becomes of what came back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from logging import INFO, getLogger

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from raceme.clustering.model import NonFiniteModelError
from raceme.protocol import events
from raceme.protocol.events import Ending
from raceme.protocol.timeline import push, timeline_of
from raceme.server.dispatch import Moment
from raceme.server.evaluator import EvaluateFn, Evaluator, Report
from raceme.server.guarding import judged
from raceme.server.identity import ForeignIdError, Identities, OnTrust
from raceme.server.idle import Idle
from raceme.server.interface import Questions, StopCheck
from raceme.server.outgoing import Outgoing
from raceme.server.packing import Packer
from raceme.server.plan import Plan
from raceme.server.replies import Answer, InvalidReplyError, Update, read_reply
from raceme.server.reports import answer_taken, applied_update, fill_result, joined, unasked
from raceme.server.rest import AT_REST, is_at_rest
from raceme.server.steps import Steps
from raceme.server.together import Together
from raceme.server.work import Task

log = getLogger("raceme")

_FLEET_CHECK_SECONDS = 5.0
"""How often the list of online nodes is looked at while replies keep coming."""
_GREETING_SECONDS = 60.0
"""How long a node that has come is expected to introduce itself any moment."""
_REST_SECONDS = (0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 60.0)
"""Pause of a client before it is given work again, after 1, 2, … unusable replies in a row."""


class Loop:
    """Runs a method on a grid.

    Parameters
    ----------
    method : Questions
        What is asked.
    grid : Grid
        Any Flower grid.
    plan : Plan
        Limits, evaluation schedule, concurrency, drift.
    observe : Observer
        Called with everything that happens.
    stop_check : StopCheck
        Called between two steps; says whether to stop.
    timeout : float
        Seconds after which an unanswered task is lost.
    train_config, evaluate_config : ConfigRecord
        Sent along with messages.
    evaluate_fn : Callable, optional
        Evaluates models on the server.
    time_before : float
        Time at which an earlier run of the same method ended.
    identities : Identities, optional
        Says whether clients are who they say; by default they are believed.
    """

    def __init__(
        self,
        method: Questions,
        grid: Grid,
        plan: Plan,
        observe: events.Observer,
        stop_check: StopCheck,
        *,
        timeout: float,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
        evaluate_fn: EvaluateFn | None,
        time_before: float = 0.0,
        identities: Identities | None = None,
    ) -> None:
        self._method, self._grid = method, grid
        self._plan, self._identities = plan, identities or OnTrust()
        self._tell, self._stop_check, self._ttl = observe, stop_check, timeout
        self._clock = timeline_of(grid, time_before)
        self._progress = method.progress
        self._fleet = method.progress.fleet
        self._idle = Idle(self._progress.idle, self._fleet.clients)
        self._packer = Packer(method.spec)
        self._steps = Steps(
            *(plan.drift, self._progress, self.now, lambda: method.dispatch.rounds, self._observe),
            tests_tasks=plan.eval_tasks,
        )
        self._outgoing = Outgoing(method, self._packer, self._steps, train_config, timeout)
        self._evaluator = Evaluator(
            *(method, grid, self._clock, self._packer, self._steps),
            *(evaluate_config, evaluate_fn, timeout, plan.testers),
        )
        self._held: list[events.Event] | None = None
        self._num_updates = 0
        self._ending: tuple[Ending, str] | None = None

    @property
    def keeps_messages(self) -> bool:
        """Whether the grid was brought back to an earlier state, with its open messages."""
        return self._clock.keeps_messages

    def now(self) -> float:
        """Return the time on the grid's clock in seconds."""
        return self._clock.now()

    def run(self, num_updates: int, nothing_missed: bool) -> None:
        """Run until a limit is reached, nobody is left, or the user interrupts.

        Parameters
        ----------
        num_updates : int
            Updates to apply; 0: no limit.
        nothing_missed : bool
            The grid was brought back together with the method: what was open then still is.
        """
        self._num_updates = num_updates
        self._method.clusters.report_to(self._clusters_changed)
        self._method.report = self._observe
        self._method.step_of = self._steps.of
        ended_at = None
        try:
            if not nothing_missed:
                self._disconnect()
                self._progress.checked_at = self._progress.somebody_at = self.now()
                self._look_at_fleet()
            ended_at = self._run()
        except KeyboardInterrupt:
            self._ending = Ending.INTERRUPTED, "interrupted by the user"
        assert self._ending is not None, "the loop ends for a reason"
        ending, reason = self._ending
        updates = self._progress.updates
        log.log(INFO, "The run ended after %d updates: %s", updates, reason)
        ended_at = self.now() if ended_at is None else ended_at
        self._observe(events.RunEnded(ended_at, updates, reason, ending))
        fill_result(self._method, self._packer)

    def _run(self) -> float:
        """Give work, wait, act on replies, until something ends it; return when that was."""
        progress, clock = self._progress, self._clock
        while True:
            if self._is_over():
                break
            if reason := self._stop_check():
                self._ending = Ending.INTERRUPTED, reason
                break
            if self._wake() and self._is_over():
                break
            self._hand_out()
            replies = clock.wait(self._awaited(), self._next_moment())
            for reply in replies:
                # Several may have come at once; a limit holds and evaluations are due all the same.
                self._take_in(reply)
                if self._is_over():
                    break
            if self._fleet.by_node:
                progress.somebody_at = clock.now()
            if not replies or clock.now() >= progress.checked_at + _FLEET_CHECK_SECONDS:
                self._look_at_fleet()
                progress.checked_at = clock.now()
                alone_since = progress.somebody_at
                is_alone = not self._fleet.by_node and clock.now() >= alone_since + self._ttl
                if is_alone and self._ending is None:
                    self._ending = Ending.NO_CLIENTS, "all clients are gone"
                    return alone_since
        ended_at = clock.now()
        if self._fleet.by_node and not self._stopped():
            for report in self._evaluator.finish(progress.evaluated_at != progress.updates):
                self._evaluated(report)
        return ended_at if clock.is_virtual else clock.now()

    def _stopped(self) -> bool:
        """Return whether someone wants the run to end now, on a clock that cannot be held."""
        interrupted = self._ending is not None and self._ending[0] is Ending.INTERRUPTED
        return interrupted and not self._clock.free_evaluation

    # When something is due.

    def _is_over(self) -> bool:
        """Evaluate if that is due; return whether a limit is reached, and note which."""
        progress = self._progress
        for due in (self._evaluator.close_if_over(), self._evaluator.look_at_tasks()):
            for report in due:
                self._evaluated(report)
        if self._evaluation_is_due():
            self._steps.look_before_test()
            if (evaluated := self._evaluator.begin()) is not None:
                self._evaluated(evaluated)
        if self._ending is None:
            # A limit that is reached at the same moment would hide why nothing was learnt.
            rounds = self._method.dispatch.rounds
            if hopeless := self._method.dispatch.hopeless() or progress.uselessness():
                self._ending = Ending.USELESS_REPLIES, hopeless
            elif limit := self._plan.limit(progress.updates, self._num_updates, self.now(), rounds):
                self._ending = Ending.LIMIT, limit
            elif is_at_rest(self._grid, self._fleet, self._method.dispatch, self._steps):
                self._ending = Ending.AT_REST, AT_REST
        return self._ending is not None

    def _evaluation_is_due(self) -> bool:
        progress = self._progress
        if progress.sweep is not None:
            return False
        if progress.evaluated_at < 0:
            # The first one waits for the first greetings, to include everybody.
            return bool(self._fleet.by_node) and not self._greeting_is_open()
        due = self._plan.is_tested(progress, self._method.dispatch.rounds)
        return due or self._steps.is_untested(self._plan.eval_steps)

    def _evaluated(self, report: Report) -> None:
        """Report tests, and end the run if they are an evaluation that reaches the target."""
        self._observe(report)
        if isinstance(report, events.TasksTested):
            return
        if self._ending is None and self._plan.is_reached(report):
            wanted = f"{report.measure.word} of {self._plan.target_accuracy:g}"
            self._ending = Ending.TARGET, f"the target {wanted} was reached"

    def _greeting_is_open(self) -> bool:
        """Return whether a node that has come may introduce itself any moment."""
        recent = self.now() < self._progress.greeted_at + _GREETING_SECONDS
        return recent and bool(self._fleet.greeted)

    def _next_moment(self) -> float:
        """Return until when to wait for replies at most."""
        now, progress = self.now(), self._progress
        moments = [
            progress.checked_at + _FLEET_CHECK_SECONDS,
            self._plan.deadline,
            self._idle.next_ready(now),
            self._steps.next_time(),
        ]
        # What is due and could not be done, because its client is busy, waits for a reply.
        wakes = (self._method.dispatch.wake_at(), self._method.wake_at())
        return min([*moments, *(time for time in wakes if time > now)])

    def _wake(self) -> bool:
        """Let the policy and the method do what is due by now; return whether anything was."""
        now, dispatch, woken = self.now(), self._method.dispatch, False
        if dispatch.wake_at() <= now:
            late, released = dispatch.wake(now)
            self._apply(released)
            self._give_up(late)
            woken = True
        if self._method.wake_at() <= now:
            self._method.on_wake()
            woken = True
        return woken

    def _give_up(self, numbers: Collection[int]) -> None:
        """Wait no more for the replies to some tasks."""
        open_tasks = self._progress.in_flight.items()
        late = [message_id for message_id, task in open_tasks if task.number in numbers]
        self._clock.forget(late)
        for message_id in late:
            task, dispatch = self._progress.in_flight.pop(message_id), self._method.dispatch
            self._refuse(task, dispatch.given_up_because, rests=dispatch.rests_when_late)

    def _awaited(self) -> Collection[str]:
        """Return the ids of all messages without an answer."""
        asked = self._fleet.open_greetings(), self._evaluator.open_ids()
        return Together(self._progress.in_flight.keys(), *asked)

    # The fleet.

    def _disconnect(self) -> None:
        """Forget nodes and open tasks: they belong to the grid of an earlier start."""
        progress = self._progress
        for task in progress.in_flight.values():
            self._method.close_task(task)
        progress.in_flight.clear()
        progress.idle.clear()
        self._evaluator.forget()
        for client in self._fleet.disconnect():
            self._apply(self._method.dispatch.left(client, self.now()))
            self._method.remove_client(client)

    def _look_at_fleet(self) -> None:
        """Notice who came and who left; greet the new nodes."""
        ask_again = self._identities.renewed()
        arrived, left = self._fleet.changes(self._grid.get_node_ids(), ask_again)
        for client in left:
            self._idle.remove(client)
            self._evaluator.drop(client)
            self._method.remove_client(client)
            self._observe(events.ClientLeft(self.now(), client))
            self._apply(self._method.dispatch.left(client, self.now()))
        for node in arrived:
            greeting = Message(RecordDict(), node, MessageType.QUERY, ttl=self._ttl)
            message_id = self._push(greeting)
            if message_id:
                self._fleet.greet(node, message_id)
                self._progress.greeted_at = self.now()

    def _introduce(self, node_id: int, reply: Message) -> None:
        """Welcome the client that answered a greeting, and let it have work."""
        now = self.now()
        try:
            introduced = self._fleet.introduce(node_id, reply, self._identities)
        except ForeignIdError as error:
            self._observe(error.report(now, node_id))
            return
        if isinstance(introduced, str):
            log.warning("A client is refused: %s", introduced)
            self._observe(events.UpdateRejected(now, f"node {node_id}", introduced, now))
            return
        client, returned = introduced
        name = client.client_id
        # Of one who has never been here nothing is open.
        tasks = self._progress.in_flight.items() if returned else ()
        lost = [message_id for message_id, task in tasks if task.client == name]
        self._clock.forget(lost)
        self._method.dispatch.joined(name)
        for message_id in lost:
            # It was away: what it was working on is lost, or comes too late to wait for.
            task = self._progress.in_flight.pop(message_id)
            self._refuse(task, "the client went offline with it")
        client.failures, client.ready_at = 0, now
        self._observe(joined(now, client, returned))
        self._method.add_client(client)
        self._idle.add(name)

    # Handing work out.

    def _hand_out(self) -> None:
        """Ask for evaluations that are under way, then give the method's work."""
        self._steps.look()
        self._evaluator.ask(self._idle)
        places = self._free_places()
        if places is not None and places <= 0:
            return
        rng, greeting = self._method.rng, self._greeting_is_open()
        moment = Moment(self.now(), self._fleet, self._idle, rng, greeting, places)
        wanted = list(self._method.next_work(moment))
        if places is not None and len(wanted) > places:
            order = rng.permutation(len(wanted))[:places]
            wanted = [wanted[index] for index in order]
        for made, task in [self._outgoing.message(work, self.now()) for work in wanted]:
            self._send(made, task)

    def _free_places(self) -> int | None:
        """Return how many more clients may be given work; None stands for all."""
        places = self._plan.places(len(self._fleet.by_node))
        if places is None:
            return None
        clients, open_tasks = self._fleet.clients, self._progress.in_flight.values()
        if len(self._fleet.by_node) == len(clients):
            return places - len(open_tasks)
        # Who went offline with a task trains no more: it must not keep the others from working.
        return places - sum(clients[task.client].node_id is not None for task in open_tasks)

    def _send(self, message: Message, task: Task) -> None:
        """Send work, and remember who has it."""
        self._method.open_task(task)
        self._method.dispatch.sent(task, self.now())
        self._idle.remove(task.client)
        message_id = self._push(message)
        if message_id:
            self._progress.in_flight[message_id] = task
        else:
            self._refuse(task, "the message could not be sent")

    def _push(self, message: Message) -> str | None:
        """Send one message; None if the grid would not take it."""
        return push(self._grid, self._clock, message)

    # Taking replies in.

    def _take_in(self, reply: Message) -> None:
        """Act on one reply: to a greeting, an evaluation, or work."""
        message_id = reply.metadata.reply_to_message_id
        if (node := self._fleet.greeted_by(message_id)) is not None:
            self._introduce(node, reply)
            return
        if message_id in self._evaluator.open_ids():
            for report in self._evaluator.take_in(message_id, reply, self._idle):
                self._evaluated(report)
            return
        task = self._progress.in_flight.pop(message_id, None)
        if task is None:
            self._progress.rejected += 1
            self._observe(unasked(self.now(), reply, self._fleet.by_node))
            return
        try:
            update = read_reply(reply, task, self._method.spec, self.now())
            if isinstance(update, Answer):
                self._answered(update)
            else:
                self._accept(judged(self._method, update, self.now()))
        except (InvalidReplyError, NonFiniteModelError) as error:
            self._refuse(task, str(error))

    def _accept(self, update: Update) -> None:
        """Take a valid update, and act on those that the policy releases because of it."""
        task, now = update.task, self.now()
        self._fleet.heard(task.client, update.num_examples)
        self._method.note_pull(update)
        released = self._method.dispatch.accept(update, now)
        self._progress.trained_steps[task.client] = task.step
        self._progress.rejected_in_a_row = 0
        self._fleet.clients[task.client].failures = 0
        self._apply(released)
        self._free(task.client)

    def _answered(self, answer: Answer) -> None:
        """Hand the method the answer to work that was not training."""
        task = answer.task
        self._progress.rejected_in_a_row = 0
        self._fleet.clients[task.client].failures = 0
        self._method.on_answer(answer)
        self._observe(answer_taken(self.now(), answer, self._method.exchanges))
        self._method.close_task(task)
        self._apply(self._method.dispatch.lost(task, self.now()))
        self._free(task.client)

    def _apply(self, updates: Sequence[Update]) -> None:
        """Let the method act on updates together, and report each of them.

        What the method reports meanwhile comes after the updates that gave rise to it.
        """
        if not updates:
            return
        progress, counters = self._progress, self._method.spec.counters
        updates = [self._weighed(update) for update in updates]
        self._held = []
        try:
            applied = self._method.aggregate(updates)
        except (InvalidReplyError, NonFiniteModelError) as error:
            held, self._held = self._held, None
            for update in updates:
                self._refuse(update.task, str(error))
        else:
            held, self._held = self._held, None
            for update, what in zip(updates, applied, strict=True):
                client = update.task.client
                progress.count_update(client)
                if counters is not None and what.weight and what.cluster in self._method.models:
                    self._method.models[what.cluster].copy_from(update.vector, counters)
                told = update.arrived_at, progress.updates, update, what, self._method.exchanges
                self._observe(applied_update(*told, self._plan.highest_score))
                self._method.close_task(update.task)
        self._packer.keep_only(self._method.models)
        for event in held:
            self._observe(event)

    def _weighed(self, update: Update) -> Update:
        """Let no client count as many more examples than the others have."""
        counted = self._fleet.counted(update.task.client, update.num_examples)
        return update if counted == update.num_examples else replace(update, num_examples=counted)

    def _refuse(self, task: Task, reason: str, rests: bool = True) -> None:
        """Count and report an unusable reply; its client rests longer each time in a row."""
        self._method.close_task(task)
        now, client, progress = self.now(), self._fleet.clients[task.client], self._progress
        progress.rejected += 1
        progress.rejected_in_a_row += 1
        progress.last_refusal = f"{task.client}: {reason}"
        log.warning("The %s of %s was rejected: %s", task.reply, task.client, reason)
        self._observe(events.UpdateRejected(now, task.client, reason, task.sent_at))
        if rests:
            client.ready_at = now + _REST_SECONDS[min(client.failures, len(_REST_SECONDS) - 1)]
            client.failures += 1
        self._free(task.client)
        self._apply(self._method.dispatch.lost(task, now))

    def _free(self, client: str) -> None:
        """Note that a client has nothing to do, if it is there."""
        if self._fleet.clients[client].node_id is not None:
            self._idle.add(client)

    # Reports.

    def _clusters_changed(self, change: events.ClustersChanged) -> None:
        """Pass on a change of clusters with the moment of it."""
        self._observe(replace(change, time=self.now()))

    def _observe(self, event: events.Event) -> None:
        """Report something, after the updates that are just being acted on, if there are any."""
        if self._held is not None:
            self._held.append(event)
            return
        if isinstance(event, events.ClustersChanged):
            event = replace(event, updates=self._progress.updates)
        self._tell(event)
