"""Invitations to train, which a device holds until it wishes to: by the clock, or by its loss.

A server that lets devices decide sends training with the setting ``invitation``. The model that
comes with it is the one that the device holds from then on.
"""

from __future__ import annotations

import logging
import math
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message

from raceme.config.errors import UserError
from raceme.datasets.own_file import Stamp
from raceme.protocol.messages import CONFIG, INVITATION

log = logging.getLogger("raceme.device")

AT_ONCE, INTERVAL, POISSON, DRIFT = "at-once", "interval", "poisson", "drift"

_SECONDS = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}
_RISE = 0.1
_MOST_FAILURES = 5
"""After so many looks that failed in a row a device trains."""
_EXPECTED = "at-once, interval=60s, poisson=60s, drift or drift=10%"


@dataclass(frozen=True)
class When:
    """When a device accepts an invitation.

    Attributes
    ----------
    mode : str
        ``"at-once"``, ``"interval"``, ``"poisson"`` or ``"drift"``.
    seconds : float
        From one time to the next, for ``"interval"``; mean wait, for ``"poisson"``; from one look
        at the loss to the next, for ``"drift"``.
    rise : float
        How much of itself the loss must have risen by, for ``"drift"``.
    """

    mode: str = AT_ONCE
    seconds: float = 0.0
    rise: float = _RISE


def parse_when(text: str, look: str = "10s") -> When:
    """Read when a device accepts an invitation.

    Parameters
    ----------
    text : str
        ``at-once``, ``interval=60s``, ``poisson=5min``, ``drift`` or ``drift=10%``.
    look : str
        Time from one look at the loss to the next, for ``drift``.

    Raises
    ------
    UserError
        It is none of them.
    """
    mode, given, value = text.strip().partition("=")
    if mode in (INTERVAL, POISSON) and given:
        return When(mode, _seconds(value, f"--when {mode}"))
    if mode == DRIFT:
        return When(mode, _seconds(look, "--look"), _share(value) if given else _RISE)
    if mode == AT_ONCE and not given:
        return When()
    raise UserError(f"--when '{text}' cannot be read: expected {_EXPECTED}.")


def _seconds(text: str, name: str) -> float:
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(s|min|h|)", text.strip())
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not (seconds > 0 and math.isfinite(seconds)):
        raise UserError(f"{name} must be a time above 0 such as 30s, 5min or 2h, got '{text}'.")
    return seconds


def _share(text: str) -> float:
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*%", text.strip())
    if not found:
        raise UserError(f"--when drift must be a share such as 10%, got '{text}'.")
    return float(found[1]) / 100


@dataclass
class Held:
    """An invitation that waits.

    Attributes
    ----------
    message : Message
        All of it.
    expires_at : float
        When the server gives it up, on the device's clock.
    due_at : float
        When the device acts on it.
    looks : bool
        Whether it looks at its loss then, instead of training.
    known : float or None
        Lowest loss of the model that came with it; None before the first look.
    failures : int
        Looks in a row at which the loss could not be measured.
    """

    message: Message
    expires_at: float
    due_at: float
    looks: bool = False
    known: float | None = None
    failures: int = 0

    @property
    def run_id(self) -> int:
        """The run that it is of."""
        return self.message.metadata.run_id


class Invitations:
    """The invitations that a device holds, at most one of each run.

    Parameters
    ----------
    when : When
        When it accepts one.
    clock : Callable
        Returns seconds that only grow.
    rng : random.Random, optional
        Draws waits, and where in its interval a device begins, so that not all speak at once.
    """

    def __init__(
        self,
        when: When,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._when, self._clock = when, clock
        self._rng = rng or random.Random()
        self._held: dict[int, Held] = {}
        self._trained: dict[int, tuple[Stamp | None, float]] = {}
        self._first = clock() + self._rng.uniform(0, when.seconds)

    def take(self, message: Message) -> bool:
        """Hold a message, if it is an invitation and the device does not accept all at once."""
        record = message.content.get(CONFIG)
        settings = record if isinstance(record, ConfigRecord) else ConfigRecord()
        if self._when.mode == AT_ONCE or settings.get(INVITATION) is not True:
            return False
        now, metadata = self._clock(), message.metadata
        # A clock that is wrong must not cost an invitation: the SuperLink hands out none that is
        # over.
        age = time.time() - metadata.created_at
        lasts = metadata.ttl - (age if 0 <= age < metadata.ttl else 0.0)
        former = self._held.get(metadata.run_id)
        held = Held(message, now + lasts, now)
        if self._when.mode == DRIFT:
            held.looks = metadata.run_id in self._trained
        elif former is not None:
            held.due_at = former.due_at
        else:
            held.due_at = self._next_time(now)
        self._held[metadata.run_id] = held
        return True

    def _next_time(self, now: float) -> float:
        """Return when an invitation is accepted that has just come."""
        seconds = self._when.seconds
        if self._when.mode == POISSON:
            return now + self._rng.expovariate(1 / seconds)
        return self._first + max(0, math.ceil((now - self._first) / seconds)) * seconds

    def next_in(self) -> float:
        """Return the seconds until the next one is due; infinity without any."""
        due = min((held.due_at for held in self._held.values()), default=math.inf)
        return max(0.0, due - self._clock())

    def due(self) -> Held | None:
        """Return an invitation that is due; drop those that are over."""
        now = self._clock()
        for held in [held for held in self._held.values() if held.expires_at <= now]:
            log.info("run %d: the invitation is over and dropped", held.run_id)
            del self._held[held.run_id]
        return next((held for held in self._held.values() if held.due_at <= now), None)

    def looked(self, held: Held, loss: float, stamp: Stamp | None) -> None:
        """Decide by the loss of the held model whether to train, or when to look again.

        Parameters
        ----------
        held : Held
            The invitation with the model.
        loss : float
            Mean loss on the device's present data; NaN if it could not be measured now, infinity if
            it never can be.
        stamp : Stamp or None
            State of the device's own data file.
        """
        now = self._clock()
        if math.isnan(loss):
            # It may be that a file is just being replaced. If not, the server learns of it by what
            # becomes of the training.
            held.failures += 1
            held.looks = held.failures < _MOST_FAILURES
            held.due_at = now + self._when.seconds
            return
        held.failures = 0
        if held.known is None:
            # Data that were replaced since the training are compared with what was known then.
            trained_on, trained = self._trained[held.run_id]
            moved = stamp != trained_on and math.isfinite(trained)
            held.known = trained if moved else loss
        rises = math.isinf(loss) or loss > (1 + self._when.rise) * held.known
        if math.isinf(loss):
            log.warning("run %d: the ClientApp states no loss: training at once", held.run_id)
        elif rises:
            log.info("run %d: the loss rose from %.4g to %.4g", held.run_id, held.known, loss)
        else:
            log.debug("run %d: the loss is %.4g, was %.4g", held.run_id, loss, held.known)
        # A slow rise adds up: it is compared with the lowest loss, not with the last one.
        held.known = min(held.known, loss)
        held.looks, held.due_at = not rises, now if rises else now + self._when.seconds

    def accept(self, held: Held) -> None:
        """Hold an invitation no longer: it is trained now."""
        self._held.pop(held.run_id, None)

    def trained(self, run_id: int, loss: float, stamp: Stamp | None) -> None:
        """Note that the device has trained for a run.

        Parameters
        ----------
        run_id : int
            The run.
        loss : float
            What it states as its loss; NaN if nothing.
        stamp : Stamp or None
            State of its own data file when it began.
        """
        self._trained[run_id] = stamp, loss

    def failed(self, run_id: int) -> None:
        """Note that nothing came of the wish to train: the next invitation is accepted at once."""
        self._trained.pop(run_id, None)

    def drop(self) -> list[Message]:
        """Hold nothing any more; return what was held."""
        messages = [held.message for held in self._held.values()]
        self._held.clear()
        return messages
