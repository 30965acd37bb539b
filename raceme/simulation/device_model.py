"""One simulated device over time: when its tasks end, which are lost, when it comes and goes."""

from __future__ import annotations

from collections.abc import Mapping
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
    """

    epochs: float
    bytes_down: int
    bytes_up: int
    scale: float
    examples: int | None = None


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


class DeviceModel:
    """A device with its random numbers and what it is busy with. It works on one task at a time.

    Parameters
    ----------
    device : Device
        What it is like.
    examples : int
        Its training examples.
    seed : np.random.SeedSequence
        Decides jitter, lost tasks and random absences.

    Attributes
    ----------
    busy_until : float
        When the last of its tasks ends; it is free if that is over.
    """

    def __init__(self, device: Device, examples: int, seed: np.random.SeedSequence) -> None:
        self.device = device
        self.examples = examples
        tasks, absences = seed.spawn(2)
        self._rng = np.random.default_rng(tasks)
        self.busy_until = 0.0
        self._tasks = 0
        self._switches = device.switches(np.random.default_rng(absences))
        self._switched = 0

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
        number = self._tasks
        self._tasks += 1
        duration = self.device.duration(
            examples=self.examples if load.examples is None else load.examples,
            epochs=load.epochs,
            bytes_down=load.bytes_down,
            bytes_up=load.bytes_up,
            scale=load.scale,
            rng=self._rng,
            task=number,
        )
        # Drawn whether it can happen or not, so that one setting does not change other draws.
        dropped = self._rng.uniform() < self.device.drop
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
        return next(self._switches, None)

    def state_dict(self) -> dict[str, Any]:
        """Return what has changed since the beginning, as a tree of plain values."""
        return {
            "busy-until": self.busy_until,
            "rng": self._rng.bit_generator.state,
            "tasks": self._tasks,
            "switched": self._switched,
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, on a new model of the same device and seed."""
        self.busy_until, self._tasks = tree["busy-until"], tree["tasks"]
        self._rng.bit_generator.state = tree["rng"]
        while self._switched < tree["switched"]:
            self.next_switch()
