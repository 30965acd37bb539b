"""One simulated device over time: when its tasks end, which are lost, when it comes and goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from raceme.simulation.devices import Device

DROPPED = "the task was lost on the way"
TOO_SLOW = "the task took longer than its time to live"
LOST_BEFORE = "the reply was unusable in the recorded run too"


class Workload(NamedTuple):
    """What a task costs a device.

    Attributes
    ----------
    epochs : float
        Passes over the device's training examples.
    bytes_down, bytes_up : int
        Size of the transfers.
    scale : float
        Factor on the compute time, e.g. the share of a model that is trained.
    examples : int or None
        Number of the training examples; None stands for as many as the device has.
    share : float
        Mini-batches, of those of an ordinary task: a factor on what any task takes.
    """

    epochs: float
    bytes_down: int
    bytes_up: int
    scale: float
    examples: int | None = None
    share: float = 1.0


class Outcome(NamedTuple):
    """How a task ends.

    Attributes
    ----------
    due : float
        When its reply comes, in seconds of virtual time.
    lost : str or None
        Why the reply is an error; None if it is not.
    """

    due: float
    lost: str | None


_TASKS, _ABSENCES = 0, 1
"""What a device draws random numbers for, each from a stream of its own."""
_DRAWS = np.random.Generator(np.random.PCG64(0))
"""Lent to one device after the other: a generator of its own takes ten times the memory of a
state."""


class DeviceModel:
    """A device with its random numbers and what it is busy with. It works on one task at a time.

    Parameters
    ----------
    device : Device
        What it is like.
    examples : int
        Its training examples.
    entropy : tuple[int, ...]
        Decides jitter, lost tasks and random absences.

    Attributes
    ----------
    busy_until : float
        When the last of its tasks ends; it is free if that is over.
    """

    __slots__ = (
        *("device", "examples", "busy_until", "_entropy", "_state", "_tasks"),
        *("_switches", "_switched"),
    )

    def __init__(self, device: Device, examples: int, entropy: tuple[int, ...]) -> None:
        self.device = device
        self.examples = examples
        self.busy_until = 0.0
        self._entropy = entropy
        # Of its generator, once it has drawn: state, increment, and half a number left over.
        self._state: tuple[int, int, int, int] | None = None
        self._tasks = 0
        self._switches: Iterator[float] | None = None
        self._switched = 0

    @property
    def is_new(self) -> bool:
        """Whether it is as it was made."""
        return not self._tasks and not self._switched

    def _seed(self, purpose: int) -> np.random.SeedSequence:
        return np.random.SeedSequence(self._entropy, spawn_key=(purpose,))

    def _draws(self) -> np.random.Generator:
        """Return the shared generator in this device's state."""
        _DRAWS.bit_generator.state = self._generator_state()
        return _DRAWS

    def _keep(self, tree: Mapping[str, Any]) -> None:
        """Remember the state of this device's generator."""
        inner = tree["state"]
        self._state = inner["state"], inner["inc"], tree["has_uint32"], tree["uinteger"]

    def _generator_state(self) -> dict[str, Any]:
        """Return the state of this device's generator as numpy writes it."""
        if self._state is None:
            tree: dict[str, Any] = dict(np.random.PCG64(self._seed(_TASKS)).state)
            return tree
        state, increment, has_half, half = self._state
        return {
            "bit_generator": "PCG64",
            "state": {"state": state, "inc": increment},
            "has_uint32": has_half,
            "uinteger": half,
        }

    def begin(self, load: Workload, now: float, expires: float) -> Outcome:
        """Take on a task, after those that the device is busy with, and return how it ends.

        Parameters
        ----------
        load : Workload
            What the task costs.
        now : float
            When it is sent.
        expires : float
            When whoever asked gives up: a lost task is answered by then.
        """
        number, rng = self._tasks, self._draws()
        self._tasks += 1
        duration = self.device.duration(
            examples=self.examples if load.examples is None else load.examples,
            epochs=load.epochs,
            bytes_down=load.bytes_down,
            bytes_up=load.bytes_up,
            scale=load.scale,
            rng=rng,
            task=number,
            share=load.share,
        )
        # Drawn whether it can happen or not, so that one setting does not change other draws.
        dropped = rng.uniform() < self.device.drop
        self._keep(rng.bit_generator.state)
        due = self.busy_until = max(now, self.busy_until) + duration
        if dropped:
            return Outcome(expires, DROPPED)
        if due > expires:
            return Outcome(expires, TOO_SLOW)
        return Outcome(due, LOST_BEFORE if self.device.fails(number) else None)

    def stop(self) -> None:
        """Drop all work: the device has gone offline."""
        self.busy_until = 0.0

    def next_switch(self) -> float | None:
        """Return when the device next goes offline, or comes back; None if it never does."""
        self._switched += 1
        if self._switches is None:
            self._switches = self.device.switches(np.random.default_rng(self._seed(_ABSENCES)))
        return next(self._switches, None)

    def state_dict(self) -> dict[str, Any]:
        """Return what has changed since the beginning, as a tree of plain values."""
        return {
            "busy-until": self.busy_until,
            "rng": self._generator_state(),
            "tasks": self._tasks,
            "switched": self._switched,
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, on a new model of the same device and seed."""
        self.busy_until, self._tasks = tree["busy-until"], tree["tasks"]
        self._keep(tree["rng"])
        while self._switched < tree["switched"]:
            self.next_switch()
