"""The loop: everything except the algorithm, common to all methods.

It greets clients, sends work, checks replies, counts updates, tracks churn and lost tasks,
evaluates on schedule and stops. The method selects clients and processes their updates.
"""

from __future__ import annotations

import math
import time as clock
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from logging import INFO, WARNING, getLogger
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from raceme.core import events
from raceme.core import messages as names
from raceme.core.clients import Idle
from raceme.core.clusters import NonFiniteModelError
from raceme.core.errors import UserError, about, plural, unknown_name
from raceme.core.evaluation import EvaluateFn, Evaluator, Packer
from raceme.core.events import Ending
from raceme.core.feature import FeatureContext, Held, Refusal
from raceme.core.identities import ForeignIdError, Identities
from raceme.core.options import Value
from raceme.core.progress import Plan, Steps, StopCheck
from raceme.core.requests import (
    SETTINGS,
    Answer,
    InFlight,
    InvalidReplyError,
    Outcome,
    Request,
    Update,
    read_reply,
)
from raceme.core.scheduling import SelectionContext
from raceme.core.timeline import Foreseeing, Registering, push, timeline_of
from raceme.flower.messages import CLIENT_APP_RAISED_EXCEPTION, content_of, put

if TYPE_CHECKING:
    from raceme.core.strategy import Method

log, _run_log = getLogger("raceme"), getLogger("raceme.run")

AT_REST = "at rest: no client's loss rises, and no data will change"

_MESSAGE_TYPES = {
    names.EVALUATE: MessageType.EVALUATE,
    names.LABEL_COUNTS: MessageType.QUERY,
}
"""Flower's message type by kind of work; all others are training, which takes a device's time."""
_FLEET_CHECK_SECONDS = 5.0
"""Interval of checks of the online nodes while replies arrive."""
_GREETING_SECONDS = 60.0
"""Time within which a new node is expected to answer its greeting."""
_BACK_OFF_SECONDS = (0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 60.0)
"""Back-off of a client after 1, 2, … consecutive failures."""


class _Union(Collection[str]):
    """A view of the union of disjoint collections."""

    def __init__(self, *parts: Collection[str]) -> None:
        self._parts = parts

    def __contains__(self, item: object) -> bool:
        return any(item in part for part in self._parts)

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self._parts)

    def __len__(self) -> int:
        return sum(map(len, self._parts))


_REFUSAL_TTL = 60.0
"""Seconds after which the message that tells a refused node the reason expires."""


class Loop:
    """Runs a method on a grid.

    Parameters
    ----------
    method : Method
        Strategy that decides requests and processes replies.
    grid : Grid
        Any Flower grid; a virtual one brings its own clock.
    plan : Plan
        Limits, evaluation schedule, concurrency, drift.
    observe : Observer
        Receives all events.
    stop_check : StopCheck
        Called between two steps; returns the reason to stop, if any.
    timeout : float
        Seconds after which an unanswered task is lost.
    evaluate_config : ConfigRecord
        Settings of every test message.
    evaluate_fn : Callable, optional
        Evaluates models on the server.
    identities : Identities, optional
        Verifies the ids that clients state; by default they are trusted.
    """

    def __init__(
        self,
        method: Method,
        grid: Grid,
        plan: Plan,
        observe: events.Observer,
        stop_check: StopCheck,
        *,
        timeout: float,
        evaluate_config: ConfigRecord,
        evaluate_fn: EvaluateFn | None,
        identities: Identities | None = None,
    ) -> None:
        self._method, self._grid = method, grid
        self._plan, self._identities = plan, identities
        self._observer, self._stop_check, self._ttl = observe, stop_check, timeout
        self._clock = timeline_of(grid, method.now())
        self._progress = method.progress
        self._fleet = method.progress.fleet
        self._idle = Idle(self._progress.idle, self._fleet.clients, method.features.holds)
        self._packer = Packer(method.spec)
        self._steps = Steps(
            plan.drift,
            self._progress,
            now=self.now,
            rounds=lambda: method.scheduling.rounds,
            observe=self._observe,
        )
        self._evaluator = Evaluator(
            method,
            grid,
            self._clock,
            self._packer,
            self._steps,
            config=evaluate_config,
            central=evaluate_fn,
            ttl=timeout,
            testers=plan.testers,
            report=self._evaluated,
        )
        self._held: list[events.Event] | None = None
        self._num_updates = 0
        self._ending: tuple[Ending, str] | None = None

    @property
    def keeps_messages(self) -> bool:
        """Whether the grid was restored with its open messages."""
        return self._clock.keeps_messages

    def now(self) -> float:
        """Return the time on the grid's clock in seconds."""
        return self._clock.now()

    def run(self, num_updates: int, nothing_missed: bool) -> None:
        """Run until a limit, the loss of all clients, or an interruption.

        Parameters
        ----------
        num_updates : int
            Updates to apply; 0: no limit.
        nothing_missed : bool
            Whether the grid was restored together with the method and still has the open tasks.
        """
        self._num_updates = num_updates
        method = self._method
        method.clusters.report_to(lambda change: self._observe(replace(change, time=self.now())))
        method.report, method.step_of = self._observe, self._steps.of
        is_simulated = self._clock.is_virtual
        method.features.begin(FeatureContext(method, self._steps, self._observe, is_simulated))
        ended_at = None
        try:
            if not nothing_missed:
                self._disconnect()
                self._progress.checked_at = self._progress.last_online_at = self.now()
                self._update_fleet()
            ended_at = self._run()
        except KeyboardInterrupt:
            self._ending = Ending.INTERRUPTED, "interrupted by the user"
        assert self._ending is not None, "the loop ends for a reason"
        ending, reason = self._ending
        updates = self._progress.updates
        log.info("The run ended after %s: %s", plural(updates, "update"), reason)
        is_short = ending not in (Ending.INTERRUPTED, Ending.TARGET)
        if is_short and 2 * self._progress.weightless >= updates > 0:
            _run_log.warning(
                "%d of %d updates changed no model, as the first ones of a client do with %s: the "
                "run is too short. Give more updates or rounds.",
                self._progress.weightless,
                updates,
                method,
            )
        ended_at = self.now() if ended_at is None else ended_at
        self._observe(events.RunEnded(ended_at, updates, reason, ending))
        self._fill_result()

    def _run(self) -> float:
        """Send work, wait and process replies until the end; return its time."""
        progress, clock = self._progress, self._clock
        while True:
            if self._is_over():
                break
            if reason := self._stop_check():
                self._ending = Ending.INTERRUPTED, reason
                break
            if self._wake() and self._is_over():
                break
            self._send_work()
            if self._process_held():
                continue
            if waits := self._endless_wait():
                self._ending = waits
                continue
            has_replies = self._receive()
            if self._fleet.by_node:
                progress.last_online_at = clock.now()
            if not has_replies or clock.now() >= progress.checked_at + _FLEET_CHECK_SECONDS:
                self._update_fleet()
                progress.checked_at = clock.now()
                alone_since = progress.last_online_at
                is_alone = not self._fleet.by_node and clock.now() >= alone_since + self._ttl
                if is_alone and self._ending is None:
                    where = self._plan.labels.where if not self._fleet.clients else ""
                    reason = f"no client is {where}" if where else "all clients are gone"
                    self._ending = Ending.NO_CLIENTS, reason
                    return alone_since
        ended_at = clock.now()
        # An interrupted run has no last evaluation, unless evaluations take no time.
        is_stopped = self._ending is not None and self._ending[0] is Ending.INTERRUPTED
        if self._fleet.by_node and (clock.free_evaluation or not is_stopped):
            self._evaluator.finish(progress.evaluated_at != progress.updates)
        return ended_at if clock.is_virtual else clock.now()

    def _receive(self) -> bool:
        """Wait for the next replies and process them; return whether there were any.

        Before the scheduler wakes, e.g. to close a window, all replies of that time count.
        """
        replies = received = self._clock.wait(self._open_message_ids(), self._next_deadline())
        while replies:
            for number, reply in enumerate(replies, 1):
                # After each of several simultaneous replies, check limits and evaluations.
                self._process_reply(reply)
                if self._is_over():
                    # The grid does not return the other replies again; the tests among them still
                    # count.
                    for other in replies[number:]:
                        self._evaluator.process_reply(
                            other.metadata.reply_to_message_id, other, self._idle
                        )
                    return True
            now = self.now()
            is_due = self._method.scheduling.wake_at() <= now
            replies = self._clock.wait(self._open_message_ids(), now) if is_due else []
        return bool(received)

    def _fill_result(self) -> None:
        """Fill in models and placements of the result."""
        method, result = self._method, self._method.result
        result.clusters = {k: self._packer.pack(k, model)[0] for k, model in method.served.items()}
        if result.clusters:
            result.arrays = result.clusters[method.clusters.largest()]
        result.client_clusters = {
            client: dict(method.placement(client)) for client in self._fleet.clients
        }

    # Due times.

    def _is_over(self) -> bool:
        """Evaluate if due; return whether a limit is reached, and record it."""
        progress = self._progress
        self._evaluator.close_if_over()
        self._evaluator.begin_tests_of_features(is_end=False)
        if self._evaluation_is_due():
            self._steps.report_before_test()
            self._evaluator.begin()
        if self._ending is None:
            # Checked before limits, which would hide the reason.
            rounds = self._method.scheduling.rounds
            hopeless = (
                self._method.scheduling.no_progress_reason() or progress.reason_of_uselessness()
            )
            if not hopeless and self._clock.is_virtual:
                # In simulations only: a real fleet may be incomplete, and errors may be corrected
                # meanwhile.
                hopeless = progress.common_error()
            if hopeless:
                self._ending = Ending.USELESS_REPLIES, hopeless
            elif limit := self._plan.limit(progress.updates, self._num_updates, self.now(), rounds):
                self._ending = Ending.LIMIT, limit
            elif self._is_quiescent():
                self._ending = Ending.AT_REST, AT_REST
            elif spent := self._method.features.ends():
                self._ending = Ending.LIMIT, spent
        return self._ending is not None

    def _endless_wait(self) -> tuple[Ending, str] | None:
        """Return why all clients wait forever for held updates, if they do.

        A grid that foresees arrivals knows who else will come. Elsewhere those online count, as
        for the end of a run whose clients may contribute no more, but a fleet without any such
        client may be incomplete.
        """
        progress, grid = self._progress, self._grid
        # Clients whose updates are held are tested afterwards.
        tests = any(evaluation.open for evaluation in progress.evaluations)
        works = progress.in_flight or progress.further or tests
        if works or not progress.held or self._method.features.wake_at() < math.inf:
            return None
        if isinstance(grid, Foreseeing):
            if grid.arrivals_ahead():
                return None
            if not progress.idle:
                return Ending.USELESS_REPLIES, f"all clients wait for {progress.held_for}"
        if not progress.idle:
            return None
        holds = self._method.features.holds_for_good
        if holds is None or not all(map(holds, progress.idle)):
            return None
        others = plural(len(progress.idle), "client")
        reason = f"{others} may contribute no more, and the others wait for {progress.held_for}"
        return Ending.LIMIT, reason

    def _is_quiescent(self) -> bool:
        """Return whether no client will ever train again.

        All clients are quiescent on their current data, no drift is ahead, and no new client will
        join. This is known only on a grid that foresees arrivals: real devices may join and have
        new data at any time.
        """
        fleet, grid, steps = self._fleet, self._grid, self._steps
        is_quiescent = self._method.scheduling.is_quiescent
        # Called after every update, but cheap: for most schedulers the first client is not
        # quiescent.
        if not all(
            is_quiescent(client, steps.current(client)) for client in fleet.by_node.values()
        ):
            return False
        if not fleet.by_node or not isinstance(grid, Foreseeing) or steps.next_time() < math.inf:
            return False
        # Some nodes may not have been greeted, or may not have answered, so far.
        if not fleet.by_node.keys() | fleet.refused.keys() >= set(grid.get_node_ids()):
            return False
        ahead = grid.arrivals_ahead()
        # Any offline client may return.
        away = [name for name, client in fleet.clients.items() if ahead and client.node_id is None]
        return all(ahead.values()) and all(
            is_quiescent(client, steps.current(client)) for client in away
        )

    def _evaluation_is_due(self) -> bool:
        progress = self._progress
        if progress.evaluation is not None:
            return False
        if progress.evaluated_at < 0:
            # The first evaluation waits for the first greetings, to include every client.
            return bool(self._fleet.by_node) and not self._greeting_is_open()
        due = self._plan.is_tested(progress, self._method.scheduling.rounds)
        return due or self._steps.is_untested(self._plan.eval_steps)

    def _evaluated(self, report: events.Evaluated) -> None:
        """Report an evaluation, and end the run if it reaches the target."""
        self._observe(report)
        if self._ending is None and self._plan.is_reached(report):
            wanted = f"{report.measure.word} of {self._plan.target_accuracy:g}"
            self._ending = Ending.TARGET, f"the target {wanted} was reached"

    def _greeting_is_open(self) -> bool:
        """Return whether a new node may still answer its greeting."""
        recent = self.now() < self._progress.greeted_at + _GREETING_SECONDS
        return recent and bool(self._fleet.greeted)

    def _next_deadline(self) -> float:
        """Return the latest time to wait for replies."""
        now, progress = self.now(), self._progress
        moments = [
            progress.checked_at + _FLEET_CHECK_SECONDS,
            self._plan.deadline,
            self._idle.next_ready(now),
            self._steps.next_time(),
        ]
        if (due := self._method.features.wake_at()) > now:
            moments.append(due)
        # Due work of a busy client waits for its reply.
        wake_at = self._method.scheduling.wake_at()
        return min([*moments, wake_at] if wake_at > now else moments)

    def _wake(self) -> bool:
        """Let the scheduler act on due events; return whether there were any."""
        now, scheduling = self.now(), self._method.scheduling
        if scheduling.wake_at() > now:
            return False
        late, released = scheduling.wake(now)
        self._apply(released)
        self._give_up(late)
        return True

    def _give_up(self, numbers: Collection[int]) -> None:
        """Give up some tasks."""
        open_tasks = self._progress.in_flight.items()
        late = [message_id for message_id, task in open_tasks if task.number in numbers]
        self._clock.forget(late)
        for message_id in late:
            task, scheduling = self._progress.in_flight.pop(message_id), self._method.scheduling
            self._refuse(task, scheduling.timeout_reason, backs_off=scheduling.backs_off_when_late)
        held = self._progress.held.items()
        for client in [name for name, task in held if task.number in numbers]:
            # Its update arrived in time and is held.
            self._refuse(
                self._stop_holding(client), self._method.scheduling.timeout_reason, backs_off=False
            )

    def _open_message_ids(self) -> Collection[str]:
        """Return the ids of all messages without an answer."""
        tests = [evaluation.open for evaluation in self._progress.evaluations]
        progress = self._progress
        return _Union(progress.in_flight, progress.further, self._fleet.open_greetings, *tests)

    # The fleet.

    def _disconnect(self) -> None:
        """Drop nodes and open tasks, which belong to an earlier grid."""
        progress = self._progress
        for task in (*progress.in_flight.values(), *progress.held.values()):
            self._method.close_task(task)
        for open_messages in (progress.in_flight, progress.held, progress.further, progress.idle):
            open_messages.clear()
        self._evaluator.forget()
        for client in self._fleet.disconnect():
            self._apply(self._method.scheduling.left(client, self.now()))
            self._method.on_leave(client)

    def _update_fleet(self) -> None:
        """Update the fleet: clients that joined or left; greet new nodes."""
        if isinstance(self._grid, Registering):
            for device, change in self._grid.key_changes():
                self._observe(events.KeyChanged(self.now(), device, change))
        online = list(self._grid.get_node_ids())
        ask_again = self._identities is not None and self._identities.renewed()
        if ask_again:
            online = self._without_changed_keys(online)
        arrived, left = self._fleet.changes(online, ask_again)
        for client in left:
            self._idle.remove(client)
            self._evaluator.drop(client)
            self._method.on_leave(client)
            self._observe(events.ClientLeft(self.now(), client))
            self._apply(self._method.scheduling.left(client, self.now()))
        for node in arrived:
            greeting = Message(RecordDict(), node, MessageType.QUERY, ttl=self._ttl)
            if message_id := push(self._grid, self._clock, greeting):
                self._fleet.greet(node, message_id)
                self._progress.greeted_at = self.now()

    def _without_changed_keys(self, nodes: list[int]) -> list[int]:
        """Leave out nodes whose keys no longer match their clients.

        They are greeted again at the next check, and refused.
        """
        assert self._identities is not None
        bound = []
        for node in nodes:
            if (client := self._fleet.by_node.get(node)) is not None:
                try:
                    self._identities.check(node, client)
                except ForeignIdError:
                    self._drop_tasks(client, "the client's key was revoked")
                    continue
            bound.append(node)
        return bound

    def _drop_tasks(self, client: str, reason: str) -> None:
        """Drop the open tasks of a client that left."""
        open_tasks = self._progress.in_flight.items()
        lost = [message_id for message_id, task in open_tasks if task.client == client]
        self._clock.forget(lost)
        for message_id in lost:
            self._refuse(self._progress.in_flight.pop(message_id), reason, is_away=True)
        if client in self._progress.held:
            self._refuse(self._stop_holding(client), reason, is_away=True)

    def _send_refusal(self, node_id: int, reason: str) -> None:
        """Send a refused node the reason, for the log of its device; its answer is ignored."""
        if not self._clock.is_virtual:
            content = RecordDict({names.CONFIG: ConfigRecord({names.REASON: reason})})
            message = Message(content, node_id, names.REFUSED, ttl=min(self._ttl, _REFUSAL_TTL))
            push(self._grid, self._clock, message)

    def _introduce(self, node_id: int, reply: Message) -> None:
        """Register the client that answered a greeting."""
        now = self.now()
        try:
            introduced = self._fleet.introduce(node_id, reply, self._identities, self._plan.labels)
        except ForeignIdError as error:
            self._observe(error.report(now, node_id))
            self._send_refusal(node_id, str(error))
            return
        if isinstance(introduced, str):
            name = f"node {node_id}"
            log.warning("A client is refused: %s", introduced, extra=about(name))
            self._observe(events.UpdateRejected(now, name, introduced, now))
            self._send_refusal(node_id, introduced)
            return
        if introduced is None:
            assert self._plan.labels is not None
            self._send_refusal(
                node_id, f"the run takes clients with {self._plan.labels.where} only"
            )
            return
        client, returned = introduced
        name = client.client_id
        self._method.scheduling.joined(name)
        # A new client has no open tasks.
        if returned:
            # It was offline: its work is lost, or would be too late.
            self._drop_tasks(name, "the client went offline with it")
        # Leaving and returning does not shorten a back-off.
        client.ready_at = max(client.ready_at, now) if client.failures else now
        self._observe(
            events.ClientJoined(
                now,
                name,
                node_id,
                client.num_examples,
                client.group,
                returned,
                ",".join(f"{label}={value}" for label, value in client.labels.items()),
            )
        )
        self._method.on_join(client)
        self._idle.add(name)

    # Sending work.

    def _send_work(self) -> None:
        """Send open evaluations, then the method's work.

        A client just tested is offered to the method before another test.
        """
        self._steps.report_common()
        self._evaluator.ask(self._idle)
        places = self._free_places()
        if places is not None and places <= 0:
            return
        rng, greeting = self._method.rng, self._greeting_is_open()
        context = SelectionContext(self.now(), self._fleet, self._idle, rng, greeting, places)
        wanted = list(self._method.requests(context))
        progress = self._progress
        is_alone = not progress.in_flight and not progress.further
        if not wanted and is_alone and self._idle.holds is not None:
            # Features withhold work from clients only while others work; none does.
            holds, self._idle.holds = self._idle.holds, self._method.features.holds_for_good
            wanted = list(self._method.requests(context))
            self._idle.holds = holds
        if places is not None and len(wanted) > places:
            order = rng.permutation(len(wanted))[:places]
            wanted = [wanted[index] for index in order]
        wanted = [self._method.features.request(work) for work in wanted]
        for work, (message, task) in [(work, self._message(work)) for work in wanted]:
            self._send(work, message, task)
        if wanted or not self._progress.in_flight:
            self._evaluator.ask(self._idle, again=True)

    def _free_places(self) -> int | None:
        """Return how many more clients may get work; None for any number."""
        places = self._plan.places(len(self._fleet.by_node))
        if places is None:
            return None
        clients, open_tasks = self._fleet.clients, self._progress.in_flight.values()
        if len(self._fleet.by_node) == len(clients):
            return places - len(open_tasks)
        # A client that went offline with a task does not occupy a place.
        return places - sum(clients[task.client].node_id is not None for task in open_tasks)

    def _send(self, work: Request, message: Message, task: InFlight) -> None:
        """Send work and track it until the reply."""
        if self._method.needs.latencies and isinstance(self._grid, Foreseeing):
            task = replace(task, expected=self._grid.expected_seconds(message))
        self._method.open_task(task, work)
        self._method.scheduling.sent(task, self.now())
        self._idle.remove(task.client)
        if message_id := push(self._grid, self._clock, message):
            self._progress.in_flight[message_id] = task
        else:
            self._refuse(task, "the message could not be sent")

    def _message(self, work: Request) -> tuple[Message, InFlight]:
        """Make the message of a work item, with a task number and the fields that the reply echoes.

        Raises
        ------
        ValueError
            The client is offline: an error of the method.
        UserError
            A setting or a model of the request is unknown.
        """
        method, progress = self._method, self._progress
        node_id = self._fleet.clients[work.client].node_id
        if node_id is None:
            raise ValueError(f"{method} has work for '{work.client}', which is away")
        self._check_settings(work)
        records, size, versions = self._models(work)
        main = method.clusters.main(work.client)
        cluster = next(iter(versions)) if len(versions) == 1 else main
        step = self._steps.of(work.client)
        size += sum(record.count_bytes() for record in work.arrays.values())
        task = InFlight(
            number=progress.tasks,
            client=work.client,
            cluster=cluster,
            version=method.models[cluster].version,
            updates=progress.updates,
            sent_at=self.now(),
            bytes_down=0 if work.is_held else size,
            candidates=versions,
            kind=work.kind,
            step=step or 0,
            phase=work.phase or work.kind,
        )
        progress.tasks += 1
        settings = method.train_config.copy()
        for name, value in {**method.scheduling.settings(work), **work.settings}.items():
            # Flower takes no numbers of numpy.
            settings[name] = value.item() if isinstance(value, np.generic) else value
        own: dict[str, Value] = {}
        if names.ROUND not in settings:
            own |= {names.TASK: task.number, names.VERSION: task.version}
        if work.kind != names.TRAIN:
            own[names.KIND] = work.kind
        if step is not None:
            own[names.STEP] = step
        put(settings, own)
        content = content_of({**records, **work.arrays, names.CONFIG: settings})
        kind = _MESSAGE_TYPES.get(work.kind, MessageType.TRAIN)
        return Message(content, node_id, kind, ttl=self._ttl), task

    def _check_settings(self, work: Request) -> None:
        """Raise UserError for a setting that no client reads, instead of ignoring it."""
        method = self._method
        unknown = work.settings.keys() - SETTINGS - method.train_config.keys()
        if not unknown or (own := method.needs.settings) is None:
            return
        own |= method.features.settings
        if unknown - own:
            known = SETTINGS | own | method.train_config.keys()
            raise unknown_name(f"setting in a request of {method}", min(unknown - own), known)

    def _models(self, work: Request) -> tuple[dict[str, ArrayRecord], int, dict[int, int]]:
        """Return the models to send, their size, and the versions of named ones by cluster."""
        models = self._method.models
        if work.models is None:
            record, size = self._packer.serve(models, self._method.placement(work.client))
            return {names.ARRAYS: record}, size, {}
        if unknown := set(work.models) - models.keys():
            raise UserError(
                f"A request of {self._method} names model {unknown.pop()}: there is no such "
                f"cluster, only {list(models)}."
            )
        versions = {cluster: models[cluster].version for cluster in work.models}
        records, size = self._packer.pack_some(models, work.models, work.kind != names.TRAIN)
        return records, size, versions

    # Receiving replies.

    def _process_reply(self, reply: Message) -> None:
        """Process a reply to work, a greeting or an evaluation."""
        message_id = reply.metadata.reply_to_message_id
        if (task := self._progress.in_flight.pop(message_id, None)) is None:
            if (node := self._fleet.open_greetings.get(message_id)) is not None:
                self._introduce(node, reply)
            elif (asked := self._progress.further.pop(message_id, None)) is not None:
                self._process_further_answer(asked, reply)
            elif not self._evaluator.process_reply(message_id, reply, self._idle):
                self._ignore(reply)
            return
        try:
            features = self._method.features
            update = read_reply(reply, task, self._method.spec, self.now(), features.reply)
            if isinstance(update, Answer):
                self._answered(update)
            else:
                self._accept_or_hold(features.update(update), task)
        except (InvalidReplyError, NonFiniteModelError) as error:
            away = isinstance(error, InvalidReplyError) and error.is_away
            if reply.has_error() and reply.error.code == CLIENT_APP_RAISED_EXCEPTION:
                self._progress.raised[task.client] = str(error)
            else:
                self._progress.raised.pop(task.client, None)
            self._refuse(task, str(error), is_away=away)

    # Updates that features hold.

    def _accept_or_hold(self, update: Update | Held, task: InFlight) -> None:
        """Accept an update as the features have changed it, or keep its task open."""
        if isinstance(update, Held):
            self._progress.held[task.client] = task
            self._progress.held_for = update.reason
        else:
            self._accept(update)

    def _process_held(self) -> bool:
        """Send requests for held updates, release or refuse them; return whether any task ended."""
        features, has_ended = self._method.features, False
        for feature, item in features.pending():
            client = item.task.client if isinstance(item, Update) else item.client
            if client not in self._progress.held:
                # An earlier step of this loop has ended its task.
                continue
            if isinstance(item, Request):
                self._send_further_request(item)
                continue
            has_ended, task = True, self._stop_holding(client)
            try:
                if isinstance(item, Refusal):
                    raise InvalidReplyError(item.reason)
                self._accept_or_hold(features.update(item, after=feature), task)
            except (InvalidReplyError, NonFiniteModelError) as error:
                self._refuse(task, str(error))
        return has_ended

    def _stop_holding(self, client: str) -> InFlight:
        """Stop holding a client's update, and return its task."""
        self._drop_further_request(client)
        return self._progress.held.pop(client)

    def _drop_further_request(self, client: str) -> None:
        """Drop an open request for a client's held update; a late answer is ignored."""
        open_requests = self._progress.further
        former = [number for number, task in open_requests.items() if task.client == client]
        self._clock.forget(former)
        for message_id in former:
            del open_requests[message_id]

    def _send_further_request(self, work: Request) -> None:
        """Send a feature's request to the client of an update that it holds."""
        held, node_id = self._progress.held[work.client], self._fleet.clients[work.client].node_id
        self._drop_further_request(work.client)
        if node_id is None:
            self._refuse(self._stop_holding(work.client), "the client went offline", is_away=True)
            return
        size = sum(record.count_bytes() for record in work.arrays.values())
        phase = work.phase or work.kind
        task = replace(
            held, kind=work.kind, phase=phase, sent_at=self.now(), bytes_down=size, candidates={}
        )
        settings: dict[str, Any] = {**work.settings, names.KIND: work.kind}
        settings[names.TASK] = task.number
        content = content_of({**work.arrays, names.CONFIG: ConfigRecord(settings)})
        message = Message(content, node_id, MessageType.TRAIN, ttl=self._ttl)
        if message_id := push(self._grid, self._clock, message):
            self._progress.further[message_id] = task
        else:
            self._refuse(self._stop_holding(work.client), "the message could not be sent")

    def _process_further_answer(self, asked: InFlight, reply: Message) -> None:
        """Pass the answer to a feature's further request on; without one, refuse the update."""
        try:
            answer = read_reply(reply, asked, self._method.spec, self.now())
            assert isinstance(answer, Answer), "no further request is for training"
            self._method.features.answer(answer)
        except InvalidReplyError as error:
            self._refuse(self._stop_holding(asked.client), str(error), is_away=error.is_away)
            return
        down, up = self._traffic(answer)
        phase = asked.phase
        self._observe(events.AnswerTaken(self.now(), asked.client, asked.kind, phase, down, up))

    def _ignore(self, reply: Message) -> None:
        """Report a reply without a task; it has no effect."""
        node, now = reply.metadata.src_node_id, self.now()
        client = self._fleet.by_node.get(node, f"node {node}")
        reason = "no task waits for it: it was not asked for, is a repetition, or came too late"
        self._progress.rejected += 1
        log.warning("A reply of %s is ignored: %s", client, reason, extra=about(client))
        self._observe(events.UpdateRejected(now, client, reason, now))

    def _accept(self, update: Update) -> None:
        """Accept a valid update, and apply those that the scheduler releases."""
        task, progress = update.task, self._progress
        self._fleet.record_examples(task.client, update.num_examples)
        released = self._method.scheduling.accept(update, update.arrived_at)
        progress.trained_steps[task.client] = task.step
        progress.rejected_in_a_row.clear()
        self._fleet.clients[task.client].failures = 0
        self._apply(released)
        self._mark_idle(task.client)

    def _answered(self, answer: Answer) -> None:
        """Pass an answer to work other than training to the method."""
        task, now = answer.task, self.now()
        self._progress.rejected_in_a_row.clear()
        self._fleet.clients[task.client].failures = 0
        self._method.on_answer(answer)
        down, up = self._traffic(answer)
        self._observe(events.AnswerTaken(now, task.client, task.kind, task.phase, down, up))
        self._method.close_task(task)
        self._apply(self._method.scheduling.lost(task, now))
        self._mark_idle(task.client)

    def _traffic(self, reply: Update | Answer) -> tuple[int, int]:
        """Return the bytes down and up of a reply; 0 if models do not travel."""
        exchanges = self._method.needs.exchange
        return (reply.task.bytes_down, reply.bytes_up) if exchanges else (0, 0)

    def _apply(self, updates: Sequence[Update]) -> None:
        """Let the method aggregate updates, and report each of them.

        The method's reports follow the updates that caused them.
        """
        if not updates:
            return
        progress, counters = self._progress, self._method.spec.counters
        updates = [self._with_plausible_examples(update) for update in updates]
        self._held = []
        try:
            outcomes = self._method.applied(updates)
        except (InvalidReplyError, NonFiniteModelError) as error:
            held, self._held = self._held, None
            for update in updates:
                self._refuse(update.task, str(error))
        else:
            held, self._held = self._held, None
            for update, outcome in zip(updates, outcomes, strict=True):
                progress.count_update(update.task.client, outcome.weight)
                model = self._method.models.get(outcome.cluster)
                if counters is not None and outcome.weight and model is not None:
                    model.copy_from(update.vector, counters)
                self._observe(self._applied(update, outcome))
                self._method.close_task(update.task)
            self._method.features.applied(updates, outcomes)
        self._packer.keep_only(self._method.models)
        for event in held:
            self._observe(event)

    def _applied(self, update: Update, outcome: Outcome) -> events.UpdateApplied:
        """Return the report of an update just counted."""
        task, metrics, time = update.task, update.metrics, update.arrived_at
        down, up = self._traffic(update)

        def score(name: str) -> float | None:
            stated = metrics.get(name, math.nan)
            is_possible = 0 <= stated <= self._plan.highest_score and math.isfinite(stated)
            return stated if is_possible else None

        def run_time(name: str) -> float | None:
            # Convert a client's times to times of the run.
            stated = metrics.get(name, math.nan)
            return time - (clock.time() - stated) if math.isfinite(stated) else None

        return events.UpdateApplied(
            seq=self._progress.updates,
            time=time,
            client=task.client,
            cluster=outcome.cluster,
            base_version=task.version,
            staleness=outcome.staleness,
            weight=outcome.weight,
            dispatched_at=task.sent_at,
            train_loss=update.train_loss,
            bytes_down=down,
            bytes_up=up,
            started_at=run_time(names.STARTED_AT),
            finished_at=run_time(names.FINISHED_AT),
            step=task.step,
            accuracy_before=score(names.ACCURACY_BEFORE),
            accuracy_after=score(names.ACCURACY_AFTER),
            passes=names.count_of(metrics.get(names.SAMPLE_PASSES)),
            mixture=update.mixture,
            phase=task.phase,
            cpu_seconds=update.cpu_seconds,
        )

    def _with_plausible_examples(self, update: Update) -> Update:
        """Limit an update's number of examples to a plausible value."""
        counted = self._fleet.plausible_examples(update.task.client, update.num_examples)
        return update if counted == update.num_examples else replace(update, num_examples=counted)

    def _refuse(
        self, task: InFlight, reason: str, backs_off: bool = True, is_away: bool = False
    ) -> None:
        """Count and report an unusable reply; its client backs off longer each time."""
        self._method.close_task(task)
        now, client, progress = self.now(), self._fleet.clients[task.client], self._progress
        progress.rejected += 1
        in_a_row = progress.rejected_in_a_row
        in_a_row[task.client] = in_a_row.get(task.client, 0) + 1
        progress.last_refusal = f"{task.client}: {reason}"
        extra = about(task.client, cluster=task.cluster, request=task.number)
        # Who does not back off is not to blame: the end of a window is part of the method.
        level, text = WARNING if backs_off else INFO, "The %s of %s was rejected: %s"
        log.log(level, text, task.reply, task.client, reason, extra=extra)
        self._observe(events.UpdateRejected(now, task.client, reason, task.sent_at))
        if is_away or backs_off:
            client.ready_at = (
                now + _BACK_OFF_SECONDS[min(client.failures, len(_BACK_OFF_SECONDS) - 1)]
            )
        if backs_off and not is_away:
            client.failures += 1
        self._mark_idle(task.client)
        self._apply(self._method.scheduling.lost(task, now))

    def _mark_idle(self, client: str) -> None:
        """Mark an online client as idle."""
        if self._fleet.clients[client].node_id is not None:
            self._idle.add(client)

    # Reports.

    def _observe(self, event: events.Event) -> None:
        """Report an event, after the updates in progress."""
        if self._held is not None:
            self._held.append(event)
            return
        if isinstance(event, events.ClustersChanged):
            event = replace(event, updates=self._progress.updates)
        self._observer(event)
