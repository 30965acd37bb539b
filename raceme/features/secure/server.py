"""The server half: cohorts of members whose updates are ready, and the stages of their sums."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import getLogger
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from raceme.core.config import RunConfig
from raceme.core.errors import UserError, plural
from raceme.core.events import MeasureSchema, grouped
from raceme.core.feature import Feature, FeatureContext, Held, Refusal
from raceme.core.messages import (
    ARRAYS,
    BYTES_UP,
    COMPUTE_SCALE,
    NUMBERS,
    SKETCH,
    TASK_SHARE,
    TRAIN_SKETCH,
    TRAINING,
    InvalidReplyError,
    ModelSpec,
    Vector,
    array_of,
    to_array,
)
from raceme.core.requests import Answer, InFlight, Request, Update, Value
from raceme.core.sketches import SIZE, Sketcher
from raceme.features.secure import COHORT, Options
from raceme.features.secure.protocol import (
    ANSWERED,
    KEY_BYTES,
    KEYS,
    MASKED,
    MISSING,
    NEXT,
    POSITION,
    SECURE,
    SHARE_BYTES,
    SHARES,
    STAGE,
    TOKEN_BYTES,
    UNMASK,
    WEIGHT,
    Bytes,
    Masked,
    ProtocolError,
    Scale,
    combined,
    common_masks,
    is_public_key,
    mask,
    mean_of,
    public_key,
    threshold,
)
from raceme.flower.messages import array_record

if TYPE_CHECKING:
    from raceme.core.strategy import Needs

log = getLogger("raceme")

SUM = MeasureSchema(
    "secure_sum",
    "updates in the sums that the server learns",
    ("cluster", "summed", "members", "seconds"),
    value="summed",
    summary="mean",
)
"""One event per cohort; the seconds are those from the first member's update to the sum."""

_SHORTEST = 16 * SIZE
"""Fewest weights of a model of which a sketch shows little."""
_NO_KEYS: Bytes = np.empty(0, np.uint8)


@dataclass
class Member:
    """A client whose update is ready.

    Attributes
    ----------
    update : Update
        Its update, without the model, which stays on the device.
    keys : NDArray[np.uint8]
        Its two public keys, of shape (66,); empty while it is asked for new ones.
    asked_at : float
        Time of that request.
    """

    update: Update
    keys: Bytes
    asked_at: float = 0.0


@dataclass
class Cohort:
    """Members whose updates are summed, named by their positions.

    Attributes
    ----------
    cluster : int
        Their cluster.
    keys : NDArray[np.uint8]
        Their public keys. Shape (members, 66).
    members : dict[str, int]
        The clients that have not left it, with their positions.
    began : float
        Start of the present stage.
    stage : str
        The present stage.
    shares : dict[int, NDArray[np.uint8]]
        Encrypted shares by sender, a row for each receiver.
    weights : dict[int, float]
        Weight of each member's update, relative to the largest.
    total : NDArray[np.uint32]
        Sum of the masked updates. Shape (d,), or (0,) before the first.
    summed : list[int]
        The members whose masked updates it contains.
    revealed : dict[int, NDArray[np.uint8]]
        The shares that each of them has revealed.
    """

    cluster: int
    keys: Bytes
    members: dict[str, int]
    began: float
    stage: str = SHARES
    shares: dict[int, Bytes] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)
    total: Masked = field(default_factory=lambda: np.empty(0, np.uint32))
    summed: list[int] = field(default_factory=list)
    revealed: dict[int, Bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of members at its start."""
        return len(self.keys)

    @property
    def answered(self) -> Collection[int]:
        """The members that have answered in the present stage."""
        return {SHARES: self.shares, MASKED: self.summed, UNMASK: self.revealed}[self.stage]

    @property
    def awaited(self) -> list[str]:
        """The clients whose answers in the present stage are missing."""
        answered = self.answered
        return [client for client, at in self.members.items() if at not in answered]

    @property
    def missing(self) -> list[int]:
        """The members whose common masks remain in the sum."""
        return [position for position in self.shares if position not in self.summed]

    def mask_keys(self, positions: Collection[int]) -> dict[int, bytes]:
        """Return the public keys of members' common masks."""
        return {position: self.keys[position, :KEY_BYTES].tobytes() for position in positions}

    def mean(self, scale: Scale) -> Vector:
        """Return the weighted mean of the updates in the sum, without masks. Shape (d,).

        Raises
        ------
        ProtocolError
            A member has not kept to the protocol.
        """
        total, size = self.total.copy(), len(self.total)
        for row, position in enumerate([*self.summed, *self.missing]):
            shares = [revealed[row].tobytes() for revealed in self.revealed.values()]
            secret = combined(shares, self.size)
            if position in self.summed:
                total -= mask(secret, size)
                continue
            if public_key(secret) != self.mask_keys([position])[position]:
                raise ProtocolError("shares of a private key do not fit together")
            # The others have added the opposite.
            total += common_masks(secret, position, self.mask_keys(self.summed), size)
        return mean_of(total, [self.weights[position] for position in self.summed], scale)


@dataclass
class SecureState:
    """State of the feature.

    Attributes
    ----------
    members : dict[str, Member]
        Clients with ready updates, in the order in which they became ready.
    cohorts : list[Cohort]
        The cohorts in progress.
    sketched : dict[str, int]
        Size of the sketch that a client's present request is for.
    sums : int
        Number of sums so far.
    """

    members: dict[str, Member] = field(default_factory=dict)
    cohorts: list[Cohort] = field(default_factory=list)
    sketched: dict[str, int] = field(default_factory=dict)
    sums: int = 0


class Secure(Feature):
    """The method receives the mean of each cohort in place of its members' updates."""

    options_type = Options
    state_type = SecureState
    switch = "secure"
    client = "raceme.features.secure.client:work"
    keeps_bases = True
    upload_size = 0.0
    options: Options
    state: SecureState

    def __init__(self, options: Options | None = None, config: RunConfig | None = None) -> None:
        super().__init__(options, config)
        self._warned: set[int] = set()
        self._sketches = False

    @property
    def _scale(self) -> Scale:
        return Scale(self.options.secure_range, self.options.secure_most)

    @property
    def _is_noisy(self) -> bool:
        """Whether central privacy adds noise to the sums."""
        return bool((self.config or RunConfig()).value("privacy-central"))

    # Before a run.

    def resolved(self, needs: Needs) -> Mapping[str, Any]:
        """Draw no map of clients: it would be one of cohorts."""
        return {"client_map": False} if self.is_on else {}

    def check(self, needs: Needs) -> None:
        """Refuse methods and features that work on single updates, and impossible cohorts."""
        config, least = self.config or RunConfig(), self.options.secure_least
        self._sketches = needs.sketches and TRAIN_SKETCH not in needs.kinds
        if needs.sum_weight is None:
            raise UserError(
                f"secure: {config.strategy} compares or keeps updates of single clients, and the "
                "server learns sums only: take a method of sums, such as fedbuff."
            )
        refused = {
            "protection": (config.value("protection") != "none", "judges single updates"),
            "upload": (config.value("upload") != "float32", "is shorter than masks may be"),
            "discrepancy": (config.value("discrepancy"), "compares single updates"),
        }
        for key, (is_on, reason) in refused.items():
            if is_on:
                raise UserError(f"secure: {key} {reason}: leave it out.")
        if least > self.options.secure_most:
            raise UserError(f"secure-most must be at least secure-least, {least}.")
        parameters, clients = config.parameters(), config.num_clients
        working = min(getattr(parameters, "participants", int)(clients), clients)
        if least > working:
            raise UserError(
                f"secure-least: no cohort of {least} members forms, as {working} clients work at a "
                "time: take fewer members, or more clients."
            )

    def check_model(self, spec: ModelSpec) -> None:
        """Refuse sketches of a model that is hardly longer."""
        if self._sketches and spec.size < _SHORTEST:
            raise UserError(
                f"secure: sketches of {SIZE} numbers, by which clients are grouped, show much of a "
                f"model of {spec.size} weights: take one of {_SHORTEST} or more."
            )

    # Updates become ready.

    def on_request(self, request: Request, context: FeatureContext) -> Request:
        """Note which clients send a sketch."""
        if size := request.settings.get(SKETCH):
            self.state.sketched[request.client] = int(size)  # type: ignore[arg-type]
        return request

    def on_reply(self, content: RecordDict, context: FeatureContext) -> RecordDict:
        """Check that the model has stayed on the device; zeros stand in for it."""
        records = dict(content)
        numbers = content.array_records.get(NUMBERS, array_record({}))
        if ARRAYS in records or not (KEYS in numbers or SKETCH in numbers):
            raise InvalidReplyError(
                "it is not masked: the device's raceme knows no secure aggregation, or its run "
                "has another configuration"
            )
        records[ARRAYS] = context.spec.pack(np.zeros(context.spec.size, np.float32))
        return RecordDict(records)

    def on_update(self, update: Update, context: FeatureContext) -> Update | Refusal | Held:
        """Hold an update until it is part of a sum; let a sketch pass."""
        keys = update.numbers.get(KEYS, _NO_KEYS)
        if size := self.state.sketched.get(update.task.client):
            length = Sketcher(size).length(len(context.compared(update.vector)))
            sketch = array_of(update.numbers, SKETCH, (length,))
            return replace(update, numbers={SKETCH: sketch.astype(np.float32)})
        if refusal := self._checked(keys):
            return Refusal(refusal)
        others = {name: of for name, of in update.numbers.items() if name != KEYS}
        update = replace(update, vector=np.empty(0, np.float32), numbers=others)
        self.state.members[update.task.client] = Member(update, keys)
        return Held(f"cohorts of {self.options.secure_least} members of a cluster (secure-least)")

    def _checked(self, keys: NDArray[Any]) -> str:
        """Return why a member's keys are refused, or an empty text."""
        has_form = keys.shape == (2 * KEY_BYTES,) and keys.dtype == np.uint8
        # Other members would fail for an invalid one.
        if not has_form or not all(is_public_key(key.tobytes()) for key in np.split(keys, 2)):
            return "its public keys are invalid"
        if any(np.array_equal(keys, other.keys) for other in self.state.members.values()):
            return "its keys are those of another member: is the device a copy?"
        return ""

    def on_closed(self, task: InFlight, context: FeatureContext) -> None:
        """Forget a member whose task has ended; its cohort does not wait for it."""
        if task.kind in TRAINING:
            self.state.sketched.pop(task.client, None)
            self.state.members.pop(task.client, None)
            for cohort in self.state.cohorts:
                cohort.members.pop(task.client, None)

    # Cohorts form.

    def pending(self, context: FeatureContext) -> Iterator[Request | Update | Refusal]:
        """Go on with cohorts whose members have answered, and form new ones."""
        for cohort in list(self.state.cohorts):
            yield from self._proceed(cohort, context)
        yield from self._formed(context)

    def wake_at(self, context: FeatureContext) -> float:
        """Return the next end of a wait for answers."""
        times = [cohort.began for cohort in self.state.cohorts]
        times += [member.asked_at for member in self.state.members.values() if not member.keys.size]
        open_waits = (time for time in times if not self._is_late(time, context))
        return min(open_waits, default=math.inf) + self.options.secure_seconds

    def _is_late(self, since: float, context: FeatureContext) -> bool:
        return context.now() >= since + self.options.secure_seconds

    def _formed(self, context: FeatureContext) -> Iterator[Request | Refusal]:
        """Form cohorts of ready members of a cluster.

        One after the other, so that no other sum changes the staleness of updates. Where updates
        wait for each other anyway, all at once when no other client of the cluster is at work.
        """
        cohorts, least = self.state.cohorts, self.options.secure_least
        for cluster, clients in self._ready(context).items():
            is_busy = any(cohort.cluster == cluster for cohort in cohorts)
            if self._expects_more(cluster, context) if context.together else is_busy:
                continue
            if len(clients) >= least:
                # Of equal size, so that no members are left over.
                count = math.ceil(len(clients) / self.options.secure_most)
                parts = [clients[part::count] for part in range(count)]
                for part in parts if context.together else parts[:1]:
                    yield from self._begin(cluster, part, context)
            elif context.together:
                reason = f"fewer than {least} members of its cluster are ready (secure-least)"
                yield from (Refusal(reason, client) for client in clients)
            else:
                self._warn(cluster, context)

    def _ready(self, context: FeatureContext) -> dict[int, list[str]]:
        """Return the clients that can form cohorts, by cluster."""
        within = {client for cohort in self.state.cohorts for client in cohort.members}
        return grouped(
            (context.clusters.main(client), client)
            for client, member in self.state.members.items()
            if member.keys.size and client not in within and context.is_online(client)
        )

    def _expects_more(self, cluster: int, context: FeatureContext) -> bool:
        """Return whether clients of a cluster are at work, or asked for new keys."""
        busy = [task.client for task in context.at_work]
        for client, member in self.state.members.items():
            if not member.keys.size and not self._is_late(member.asked_at, context):
                busy.append(client)
        return any(
            context.clusters.main(client) == cluster and context.is_online(client)
            for client in busy
        )

    def _warn(self, cluster: int, context: FeatureContext) -> None:
        """Warn once of a cluster that is too small for a cohort."""
        online, least = context.clusters.size(cluster), self.options.secure_least
        if online < least and cluster not in self._warned:
            self._warned.add(cluster)
            log.warning(
                "Cluster %d has %s online: updates wait until it has %d (secure-least).",
                cluster,
                plural(online, "client"),
                least,
            )

    def _begin(
        self, cluster: int, clients: Sequence[str], context: FeatureContext
    ) -> Iterator[Request]:
        keys = np.stack([self.state.members[client].keys for client in clients])
        members = {client: position for position, client in enumerate(clients)}
        cohort = Cohort(cluster, keys, members, context.now())
        self.state.cohorts.append(cohort)
        yield from self._requests(cohort, context)

    # Stages.

    def _proceed(
        self, cohort: Cohort, context: FeatureContext
    ) -> Iterator[Request | Update | Refusal]:
        """Begin the next stage of a cohort if no further answer is expected."""
        is_awaited = any(context.is_online(client) for client in cohort.awaited)
        if is_awaited and not self._is_late(cohort.began, context):
            return
        if len(cohort.answered) < threshold(cohort.size):
            yield from self._dissolved(cohort, context)
        elif cohort.stage == UNMASK:
            yield from self._released(cohort, context)
        else:
            for client in cohort.awaited:
                del cohort.members[client]
                yield from self._renewed(client, context)
            if cohort.stage == SHARES:
                self._weigh(cohort, context)
            cohort.stage, cohort.began = NEXT[cohort.stage], context.now()
            yield from self._requests(cohort, context)

    def _weigh(self, cohort: Cohort, context: FeatureContext) -> None:
        """Set the weights of members' updates: those of the method, relative to the largest."""
        members = self.state.members
        updates = {at: members[client].update for client, at in cohort.members.items()}
        if self._is_noisy:
            # With noise on sums, numbers of examples do not count.
            updates = {at: replace(update, num_examples=1) for at, update in updates.items()}
        weights = {at: context.weight(update) for at, update in updates.items()}
        largest = max(weights.values())
        cohort.weights = {position: weight / largest for position, weight in weights.items()}

    def _requests(self, cohort: Cohort, context: FeatureContext) -> Iterator[Request]:
        """Return the requests of the present stage."""
        told: dict[str, Value]
        for client, position in list(cohort.members.items()):
            if cohort.stage == SHARES:
                yield _request(client, SHARES, {POSITION: position}, cohort.keys)
            elif cohort.stage == MASKED:
                others = [sender for sender in cohort.shares if sender != position]
                rows = np.stack([cohort.shares[sender][position] for sender in others])
                told = {ANSWERED: others, WEIGHT: cohort.weights[position]}
                told[BYTES_UP] = 4 * context.spec.size
                yield _request(client, MASKED, told, rows)
            else:
                yield _request(client, UNMASK, {ANSWERED: cohort.summed, MISSING: cohort.missing})

    def _renewed(self, client: str, context: FeatureContext) -> Iterator[Request]:
        """Ask a member for new keys, for the next cohort."""
        member = self.state.members[client]
        member.keys, member.asked_at = _NO_KEYS, context.now()
        if context.is_online(client):
            yield _request(client, KEYS)

    def _dissolved(self, cohort: Cohort, context: FeatureContext) -> Iterator[Request | Refusal]:
        """End a cohort of which too few have answered."""
        self.state.cohorts.remove(cohort)
        log.warning(
            "Only %d of %d members of a cohort have answered (%s): it breaks up.",
            len(cohort.answered),
            cohort.size,
            cohort.stage,
        )
        for client in list(cohort.members):
            if cohort.stage == UNMASK:
                # Their updates have been summed, and a second sum might reveal one.
                yield Refusal("its cohort broke up before the sum was known", client)
            else:
                yield from self._renewed(client, context)

    def _released(self, cohort: Cohort, context: FeatureContext) -> Iterator[Update | Refusal]:
        """Release the mean of a cohort as the update of each of its members."""
        self.state.cohorts.remove(cohort)
        updates = [
            self.state.members[client].update
            for client, position in cohort.members.items()
            if position in cohort.summed
        ]
        try:
            mean = cohort.mean(self._scale)
        except ProtocolError as error:
            for update in updates:
                yield Refusal(f"the sum of its cohort is lost: {error}", update.task.client)
            return
        since = min((update.arrived_at for update in updates), default=context.now())
        context.measure(
            SUM,
            cluster=cohort.cluster,
            summed=len(cohort.summed),
            members=cohort.size,
            seconds=context.now() - since,
        )
        self.state.sums += 1
        weights = [cohort.weights[position] for position in cohort.summed]
        rounding = 2.0 * self._scale.level * math.sqrt(len(mean))
        told = np.array([self.state.sums, max(weights) / sum(weights), rounding / max(weights)])
        vectors = [context.base(update) + mean for update in updates]
        for update, vector in zip(updates, vectors, strict=True):
            numbers = {**update.numbers, COHORT: told}
            yield replace(update, vector=vector, arrived_at=context.now(), numbers=numbers)

    def on_answer(self, answer: Answer, context: FeatureContext) -> None:
        """Take a member's part in a stage, if its cohort still waits for it."""
        client, stage = answer.task.client, answer.task.phase
        if stage == KEYS:
            member, keys = self.state.members[client], _part(answer, (2 * KEY_BYTES,), np.uint8)
            if refusal := self._checked(keys):
                raise InvalidReplyError(refusal)
            member.keys = keys
            return
        cohort = next((of for of in self.state.cohorts if client in of.members), None)
        if cohort is None or stage != cohort.stage:
            return
        position = cohort.members[client]
        if stage == SHARES:
            cohort.shares[position] = _part(answer, (cohort.size, TOKEN_BYTES), np.uint8)
        elif stage == MASKED:
            masked = _part(answer, (context.spec.size,), np.uint32)
            cohort.total = cohort.total + masked if cohort.summed else masked.copy()
            cohort.summed.append(position)
        else:
            rows = len(cohort.summed) + len(cohort.missing)
            cohort.revealed[position] = _part(answer, (rows, SHARE_BYTES), np.uint8)


def _request(
    client: str, stage: str, settings: Mapping[str, Value] | None = None, sent: Bytes = _NO_KEYS
) -> Request:
    """Return the request of a stage, with an array if it is not empty."""
    arrays = {stage: array_record({stage: to_array(sent)})} if sent.size else {}
    # Simulated devices are charged for transfers only.
    said = {STAGE: stage, COMPUTE_SCALE: 0.0, TASK_SHARE: 0.0, **(settings or {})}
    return Request(client, SECURE, (), arrays, said, phase=stage)


def _part(answer: Answer, shape: tuple[int, ...], kind: type[np.generic]) -> NDArray[Any]:
    """Return the array of an answer.

    Raises
    ------
    InvalidReplyError
        It is missing, or has another shape or type.
    """
    found = answer.numbers.get(answer.task.phase)
    if found is None or found.shape != shape or found.dtype != kind:
        raise InvalidReplyError(f"its part in the stage {answer.task.phase} is invalid")
    return found
