"""Drifts that change what a client already has: its images, its labels, its noise, its amount."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.config.options import option
from raceme.datasets.drift.base import Drift, DriftOptions
from raceme.datasets.skew import rotated
from raceme.datasets.source import ClientData

_QUARTERS = 4
"""Steps of a gradual drift in a run, if nothing else is asked for."""


def gradually(config: RunConfig) -> str:
    """Return the schedule of a drift that goes on all through a run."""
    return f"every {max(1, config.planned_updates // _QUARTERS)} updates"


@dataclass(frozen=True)
class ShareOptions(DriftOptions):
    """An option of every drift that may spare some clients."""

    drift_share: float = option(1.0, "share of the clients that drift", above=0, high=1)


class SomeClients(Drift):
    """A drift of some clients, the same ones at every step."""

    options_type = ShareOptions

    def drifts(self, client: int) -> bool:
        """Return whether a client is one of those that drift."""
        count = max(1, round(self.options.drift_share * self.dealt.clients))
        return client in self.rng("who").permutation(self.dealt.clients)[:count]

    def data(self, client: int, step: int) -> ClientData:
        """Return the data as dealt out, changed by so many steps."""
        data = self.dealt.data(client)
        return self.changed(data, client, step) if self._moved(client, step) else data

    def changed(self, data: ClientData, client: int, step: int) -> ClientData:
        """Return data changed by so many steps, at least one."""
        raise TypeError(f"{type(self).__name__} does not define changed().")

    def _moved(self, client: int, step: int) -> bool:
        return step > 0 and self.drifts(client)


@dataclass(frozen=True)
class RotateOptions(ShareOptions):
    """Options of rotate."""

    rotate_degrees: float = option(30.0, "degrees that images turn per step")


class Rotate(SomeClients):
    """Images turn, anticlockwise, by rotate-degrees per step."""

    options_type = RotateOptions

    @staticmethod
    def default_schedule(config: RunConfig) -> str:
        """Return a quarter of the run for each step."""
        return gradually(config)

    def check(self) -> None:
        """Raise UserError if there are no images."""
        shape = self.dealt.dataset.shape.input_shape
        if len(shape) != 3:
            raise UserError(
                f"drift rotate turns images, and {self.dealt.config.dataset} has inputs of shape "
                f"{shape}: take noise or label-shift, or a dataset of images."
            )

    def changed(self, data: ClientData, client: int, step: int) -> ClientData:
        """Return the images turned."""
        degrees, blank = step * self.options.rotate_degrees % 360.0, self.dealt.dataset.blank
        return replace(
            data,
            x_train=rotated(data.x_train, degrees, blank),
            x_test=rotated(data.x_test, degrees, blank),
        )


@dataclass(frozen=True)
class LabelShiftOptions(ShareOptions):
    """Options of label-shift."""

    label_shift: int = option(1, "s of y + s mod C, per step")


class LabelShift(SomeClients):
    """Labels become y + s mod C: the same inputs, another task."""

    options_type = LabelShiftOptions

    def check(self) -> None:
        """Raise UserError if there are no classes, or the shift changes nothing."""
        self.needs_labels()
        classes = self.dealt.dataset.num_classes
        if self.options.label_shift % classes == 0:
            raise UserError(
                f"label-shift {self.options.label_shift} leaves the labels of {classes} classes "
                f"as they are: give another number."
            )

    def changed(self, data: ClientData, client: int, step: int) -> ClientData:
        """Return other labels."""
        shift, classes = step * self.options.label_shift, self.dealt.dataset.num_classes
        return replace(
            data,
            y_train=(data.y_train + shift) % classes,
            y_test=(data.y_test + shift) % classes,
        )


@dataclass(frozen=True)
class NoiseOptions(ShareOptions):
    """Options of noise."""

    noise_growth: float = option(
        0.5, "standard deviation that is added per step, of normalised inputs", above=0
    )


class Noise(SomeClients):
    """Gaussian noise grows by noise-growth per step, as in a sensor that wears out."""

    options_type = NoiseOptions

    @staticmethod
    def default_schedule(config: RunConfig) -> str:
        """Return a quarter of the run for each step."""
        return gradually(config)

    def check(self) -> None:
        """Raise UserError if the inputs are no quantities."""
        if self.dealt.dataset.tokens:
            raise UserError(
                f"drift noise adds to quantities, and {self.dealt.config.dataset} has text: take "
                f"swap-all or label-shift."
            )

    def changed(self, data: ClientData, client: int, step: int) -> ClientData:
        """Return noisier inputs; a sample's noise is the same but for its size at every step."""
        level = np.float32(step * self.options.noise_growth)
        train, test = (
            inputs
            + level * self.rng(f"noise {part}", client).standard_normal(inputs.shape, np.float32)
            for part, inputs in (("train", data.x_train), ("test", data.x_test))
        )
        return replace(data, x_train=train, x_test=test)


@dataclass(frozen=True)
class IncrementalOptions(DriftOptions):
    """Options of incremental."""

    incremental_start: float = option(
        0.25,
        "share of its training samples that a client begins with",
        above=0,
        high=1,
    )
    incremental_more: float = option(
        0.25, "share of its training samples that each step adds", above=0, high=1
    )
    incremental_of: str = option(
        "original",
        "what the shares are of: original, all of a client's samples, or rest, what the step "
        "before has left",
        among=("original", "rest"),
    )


class Incremental(Drift):
    """Training samples come bit by bit: 25 % at first, 25 % more with every step.

    The shares are those of all that a client will have, as the text of Duan et al. 2022 says.
    Their code takes each share of what the one before has left, so that a client's samples become
    fewer: 25, 12.5, 9.4 and 9.4 % (``incremental-of=rest``). The test samples are all there from
    the beginning, as their distribution does not change.
    """

    options_type = IncrementalOptions

    @staticmethod
    def default_schedule(config: RunConfig) -> str:
        """Return a quarter of the run for each step."""
        return gradually(config)

    def data(self, client: int, step: int) -> ClientData:
        """Return the part that is there by now; what was there stays."""
        data = self.dealt.data(client)
        share, count = self._share(step), len(data.y_train)
        there = min(count, max(1, round(share * count)))
        if there == count:
            return data
        own = np.sort(self.rng("release", client).permutation(count)[:there])
        return replace(data, x_train=data.x_train[own], y_train=data.y_train[own])

    def _share(self, step: int) -> float:
        """Return the share of a client's samples that is there at a step."""
        start: float = self.options.incremental_start
        more: float = self.options.incremental_more
        if self.options.incremental_of == "original":
            return min(1.0, start + step * more)
        # From the step on at which the share is 1, nothing changes any more.
        last = min(step, math.ceil((1.0 - start) / more))
        return math.prod(min(1.0, start + number * more) for number in range(last + 1))
