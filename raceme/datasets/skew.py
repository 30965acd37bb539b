"""Feature skew for data without users of their own: groups of clients that see things differently.

The samples are dealt out at random, so that all clients have the same labels. The clients are
divided into K groups by the shares in ``groups``, and what a client has, training and test samples
alike, is changed in the way of its group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.config.options import option, reads
from raceme.datasets.partition import (
    GroupOptions,
    Partition,
    iid,
    largest_remainder,
    parse_groups,
)
from raceme.datasets.source import Indices, generator

Inputs = NDArray[np.float32]


@dataclass(frozen=True)
class NoiseOptions(GroupOptions):
    """Groups, and how much noise there is."""

    noise_std: float = option(1.0, "deviation of the noise in the last group", low=0)


@reads(GroupOptions)
def rotation_groups(labels: Indices, config: RunConfig, rng: np.random.Generator) -> Partition:
    """Groups of clients whose images are turned by i·360/K degrees (K shares in groups)."""
    return _in_groups(labels, config, rng)


@reads(NoiseOptions)
def noise_groups(labels: Indices, config: RunConfig, rng: np.random.Generator) -> Partition:
    """Groups of clients with ever more noise, from none in the first to noise-std in the last."""
    return _in_groups(labels, config, rng)


def is_skewed(config: RunConfig) -> bool:
    """Return whether the partition makes groups that see samples in their own way."""
    return config.partition in _SKEWS


def skew(
    inputs: Inputs,
    config: RunConfig,
    group: int | None,
    client: int,
    part: str,
    blank: float | Inputs = 0.0,
) -> Inputs:
    """Change a client's inputs in the way of its group, if the partition has such ways.

    Parameters
    ----------
    inputs : Inputs
        Normalised, shape (n, ...).
    config : RunConfig
        Names the partition.
    group : int or None
        The client's true group.
    client : int
        Its position, for its own noise.
    part : str
        ``"train"`` or ``"test"``: their noise must differ.
    blank : float or Inputs
        What an empty image is, normalised: of a shape that fits one input.

    Raises
    ------
    UserError
        The inputs are not images and are to be turned.
    """
    change = _SKEWS.get(config.partition)
    if change is None or group is None:
        return inputs
    share = group / len(parse_groups(config.read(GroupOptions).groups))
    rng = generator(config.seed, f"noise {part}", client)
    return change(inputs, config, share, blank, rng)


def rotated(inputs: Inputs, degrees: float, blank: float | Inputs = 0.0) -> Inputs:
    """Turn images, shape (n, channels, height, width), anticlockwise; their size stays.

    Right angles are exact for square images. Others are interpolated bilinearly, with blank pixels
    all around the image, as torchvision's ``rotate`` does with its fill of 0.

    Parameters
    ----------
    inputs : Inputs
        Images, normalised or not.
    degrees : float
        The angle.
    blank : float or Inputs
        What comes into view at the corners; of a shape that fits one image, and the same all over
        a channel.
    """
    quarters, rest = divmod(degrees, 90)
    if rest == 0 and (inputs.shape[2] == inputs.shape[3] or quarters % 2 == 0):
        return np.ascontiguousarray(np.rot90(inputs, int(quarters), axes=(2, 3)))
    # Imported here because it takes seconds, and few need it.
    import torch
    from torch.nn.functional import affine_grid, grid_sample

    height, width = inputs.shape[2:]
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    # Where each pixel comes from: rows run downwards, and both axes are of length 2.
    turn = torch.tensor([[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]])
    # What is blank is 0 while it turns: what lies outside of the image then adds nothing.
    pixels = torch.from_numpy(inputs - np.asarray(blank, np.float32))
    grid = affine_grid(turn[None], [1, 1, height, width], align_corners=False)
    turned = grid_sample(pixels, grid.expand(len(pixels), -1, -1, -1), align_corners=False)
    return turned.numpy() + np.asarray(blank, np.float32)


def _in_groups(labels: Indices, config: RunConfig, rng: np.random.Generator) -> Partition:
    groups_text = config.read(GroupOptions).groups
    shares = parse_groups(groups_text)
    counts = largest_remainder(config.num_clients, shares)
    if counts.min() == 0:
        raise UserError(
            f"groups '{groups_text}': a share of {shares[int(np.argmin(counts))]:g} of "
            f"{config.num_clients} clients is not even one. Give larger shares or fewer groups."
        )
    groups = np.repeat(np.arange(len(shares)), counts)
    return Partition(iid(labels, config, rng).indices, tuple(groups.tolist()))


def _turn(
    inputs: Inputs,
    config: RunConfig,
    share: float,
    blank: float | Inputs,
    rng: np.random.Generator,
) -> Inputs:
    if inputs.ndim != 4:
        raise UserError(
            f"partition rotation-groups turns images, and {config.dataset} has inputs of shape "
            f"{inputs.shape[1:]}. Take noise-groups, or a dataset of images."
        )
    return rotated(inputs, 360.0 * share, blank)


def _add_noise(
    inputs: Inputs,
    config: RunConfig,
    share: float,
    blank: float | Inputs,
    rng: np.random.Generator,
) -> Inputs:
    options = config.read(NoiseOptions)
    groups = len(parse_groups(options.groups))
    # The last of K groups has share (K − 1)/K and gets all of noise-std; a lone group gets none.
    level = options.noise_std * share * groups / max(1, groups - 1)
    noise = rng.standard_normal(inputs.shape, np.float32)
    return inputs + np.float32(level) * noise


_Skew = Callable[[Inputs, RunConfig, float, float | Inputs, np.random.Generator], Inputs]
_SKEWS: dict[str, _Skew] = {
    "rotation-groups": _turn,
    "noise-groups": _add_noise,
}
