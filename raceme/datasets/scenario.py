"""The scenarios of FAACL's thesis: two groups of clients that differ in one way.

Zhang, "Asymmetric Clustering in Federated Continual Learning" (Waterloo 2024). S0: all alike. S1:
the first half of the classes, and the second. S2: true labels, and shifted ones. A1: clean images,
and noisy ones. A2: much data, and little of a task that is slightly different. The groups are
symmetric in S1 and S2; in A1 and A2 the second gains more from the first than it gives.

Our readings, where the thesis is silent: the groups are equal, every other client is of the second;
a noisy image has Gaussian noise first and salt and pepper then
(``scenario-noise=either``: one of them); a predictor that is "slightly different" differs
on some of the classes. Their labels can be learned, as the thesis' table shows that they were.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.config.options import option, reads
from raceme.datasets.partition import (
    MIN_SAMPLES,
    Partition,
    SizeOptions,
    check_enough,
    client_weights,
    divide,
)
from raceme.datasets.source import Dataset, Indices, Labels, generator

Pixels = NDArray[np.float32]

PARTITION = "scenario"
"""Name of the partition."""
_IMAGE_AXES = 4


@dataclass(frozen=True)
class ScenarioOptions:
    """Which scenario, and what it is told; the noise is the thesis' for MNIST."""

    scenario: str = option(
        "s1",
        "how two groups differ: s0 not at all, s1 classes, s2 shifted labels, a1 noisy images, a2 "
        "little data and other labels for some classes",
        among=("s0", "s1", "s2", "a1", "a2"),
    )
    scenario_variance: float = option(
        0.4, "a1: variance of the Gaussian noise, of pixels from 0 to 1", low=0
    )
    scenario_density: float = option(
        0.7, "a1: share of the pixels that salt and pepper replaces", low=0, high=1
    )
    scenario_noise: str = option(
        "both",
        "a1: a noisy image has both kinds of noise, or either, one as often as the other",
        among=("both", "either"),
    )
    scenario_little: float = option(
        0.05,
        "a2: samples of the second group's clients, as a share of the others'",
        above=0,
        high=1,
    )
    scenario_differs: float = option(
        0.1, "a2: share of the classes that the second group labels y + 1", low=0, high=1
    )


@dataclass(frozen=True)
class ScenarioPartitionOptions(ScenarioOptions, SizeOptions):
    """Options of the partition."""


@dataclass(frozen=True)
class Scenario:
    """What the clients of a group have, and how they see it.

    Attributes
    ----------
    options : ScenarioOptions
        Which scenario it is.
    seed : int
        Of the noise.
    """

    options: ScenarioOptions
    seed: int

    @property
    def groups(self) -> int:
        """Number of groups."""
        return 1 if self.options.scenario == "s0" else 2

    @property
    def divides_classes(self) -> bool:
        """Whether groups have different classes."""
        return self.options.scenario == "s1"

    @property
    def changes_samples(self) -> bool:
        """Whether groups see the same samples in different ways, or label them so."""
        return self.options.scenario in ("s2", "a1", "a2")

    def size(self, group: int) -> float:
        """Return how many samples a client of a group has, relative to one of the first."""
        return self.options.scenario_little if self.options.scenario == "a2" and group else 1.0

    def classes(self, kinds: Indices, group: int) -> Indices:
        """Return those of all classes, ascending, that a group has; of an odd number first more."""
        return np.array_split(kinds, 2)[group] if self.divides_classes else kinds

    def labels(self, y: Labels, group: int, num_classes: int) -> Labels:
        """Return labels as a group gives them: y, or y + 1 mod C.

        In S2 the second group shifts all. In A2 it shifts those of the first ``scenario-differs``
        of the classes, at least one: a function of the input, as the true class is.
        """
        if group == 0 or self.options.scenario not in ("s2", "a2"):
            return y
        shifted = (y + 1) % num_classes
        if self.options.scenario == "s2":
            return shifted
        share = self.options.scenario_differs
        count = max(1, round(share * num_classes)) if share else 0
        return np.where(y < count, shifted, y)

    def inputs(self, dataset: Dataset, samples: Indices, group: int) -> Pixels:
        """Return samples as a group sees them, normalised.

        In A1 the second group's have noise, for training, validation and testing alike: in pixels
        from 0 to 1, which are clipped to that range, before they are normalised. A sample's noise
        is the same whoever has it and whenever: it follows from the seed and the sample's number.
        """
        inputs = dataset.inputs(samples)
        if group == 0 or self.options.scenario != "a1":
            return inputs
        mean, std = np.asarray(dataset.mean, np.float32), np.asarray(dataset.std, np.float32)
        pixels = inputs * std + mean
        for position, sample in enumerate(samples.tolist()):
            rng = generator(self.seed, "scenario noise", sample)
            variance, density = self._noise(rng)
            pixels[position] = noisy(pixels[position], variance, density, rng)
        return np.asarray((pixels - mean) / std, np.float32)

    def _noise(self, rng: np.random.Generator) -> tuple[float, float]:
        """Return variance and density of an image's noise."""
        variance, density = self.options.scenario_variance, self.options.scenario_density
        if self.options.scenario_noise == "both":
            return variance, density
        return (variance, 0.0) if rng.random() < 0.5 else (0.0, density)

    def check(self, dataset: Dataset, name: str) -> None:
        """Find out whether a dataset can be seen so.

        Raises
        ------
        UserError
            There are no classes or too few, or no images where there is to be noise.
        """
        scenario = self.options.scenario
        if dataset.target is not None or (self.groups > 1 and dataset.num_classes < 2):
            raise UserError(
                f"scenario {scenario} is of two or more classes, and {name} has none: take a "
                "dataset of classes."
            )
        if scenario != "a1":
            return
        if dataset.x.ndim != _IMAGE_AXES or not _has_pixels(dataset):
            raise UserError(
                f"scenario a1 adds noise to pixels from 0 to 1, and {name} has inputs of shape "
                f"{dataset.shape.input_shape} and type {dataset.x.dtype}: take a dataset of images."
            )


@reads(ScenarioPartitionOptions)
def scenario(labels: Indices, config: RunConfig, rng: np.random.Generator) -> Partition:
    """Two groups, every other client: other classes, labels, noise or amounts (FAACL's S0 to A2).

    Samples are dealt out at random, those of a group's classes where it has classes of its own; how
    many a client has, ``sizes`` says, and ``scenario-little``.
    """
    check_enough(labels, config.num_clients)
    options = config.read(ScenarioPartitionOptions)
    chosen = Scenario(options, config.seed)
    kinds = np.unique(labels)
    if min(len(kinds), config.num_clients) < chosen.groups:
        raise UserError(
            f"scenario {options.scenario} has two groups, and there are {config.num_clients} "
            f"clients and {len(kinds)} classes: two of each are needed."
        )
    groups = np.arange(config.num_clients) % chosen.groups
    weights = client_weights(config, rng) * np.array(
        [chosen.size(group) for group in groups.tolist()]
    )
    parts: dict[int, Indices] = {}
    # Groups of the same classes have the samples together.
    for pool in range(chosen.groups if chosen.divides_classes else 1):
        members = (
            np.flatnonzero(groups == pool) if chosen.divides_classes else np.arange(len(groups))
        )
        own = np.flatnonzero(np.isin(labels, chosen.classes(kinds, pool)))
        check_enough(own, len(members), f"group {pool}")
        dealt = divide(rng.permutation(own), weights[members], MIN_SAMPLES)
        parts |= dict(zip(members.tolist(), dealt, strict=True))
    indices = tuple(np.sort(parts[client]) for client in range(config.num_clients))
    return Partition(indices, tuple(groups.tolist()))


def scenario_of(config: RunConfig) -> Scenario | None:
    """Return the scenario that a run's partition makes, if it makes one."""
    if config.partition != PARTITION:
        return None
    return Scenario(config.read(ScenarioPartitionOptions), config.seed)


def noisy(pixels: Pixels, variance: float, density: float, rng: np.random.Generator) -> Pixels:
    """Return pixels with Gaussian noise of mean 0, then salt and pepper, clipped to [0, 1].

    Parameters
    ----------
    pixels : Pixels
        From 0 to 1, of any shape.
    variance : float
        Of the Gaussian noise.
    density : float
        Share of the pixels, in expectation, that become 0 or 1, one as often as the other.
    rng : np.random.Generator
        Draws.
    """
    gaussian = rng.standard_normal(pixels.shape, np.float32)
    drawn = rng.random(pixels.shape, np.float32)
    changed = np.clip(pixels + np.float32(np.sqrt(variance)) * gaussian, 0.0, 1.0)
    changed[drawn < density] = 1.0
    changed[drawn < density / 2] = 0.0
    return changed


def _has_pixels(dataset: Dataset) -> bool:
    """Return whether inputs are pixels: bytes, or numbers from 0 to 1."""
    if dataset.x.dtype == np.uint8:
        return True
    values: NDArray[np.float32] = np.asarray(dataset.x, np.float32)
    return bool(values.min() >= 0 and values.max() <= 1)
