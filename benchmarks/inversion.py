"""Gradient inversion of one client's update: alone, in a sum, and in a sum with central noise.

    python3 benchmarks/inversion.py --data-root DATA --out docs/images/inversion.png

The attack is that of Geiping et al., "Inverting Gradients: How easy is it to break privacy in
federated learning?" (NeurIPS 2020): it seeks images whose gradient has the direction of the
observed update, minimising 1 − cos plus a weight times the total variation by Adam on signs of
gradients. The setting favours the attacker: the client takes one step of SGD from a known model on
one image, whose label is known. Of a sum it knows the number of members and all labels, and it
seeks all images at once; the one that is most like the client's image counts. The peak
signal-to-noise ratio (PSNR) in dB is stated with that of a guess: another image of the same class.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import matplotlib
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from raceme.core.config import RunConfig
from raceme.core.gaussian import clipped, gaussian_noise, seeded_key
from raceme.datasets import client_data
from raceme.training.models import build

matplotlib.use("Agg")
from matplotlib import pyplot

LR = 0.1
CLIP = 1.0
NOISE = 1.52
"""z at which 10 updates cost ε = 8 at δ = 0.001."""
CASES = {
    "one update": (1, 0.0),
    "sum of 5": (5, 0.0),
    "sum of 20": (20, 0.0),
    "sum of 20, noise": (20, NOISE),
}
Images = NDArray[np.float32]


def gradient(
    network: nn.Module, images: torch.Tensor, labels: torch.Tensor, keep: bool
) -> list[torch.Tensor]:
    """Return the gradient of the mean loss, by array of weights."""
    loss = functional.cross_entropy(network(images), labels)
    found = torch.autograd.grad(loss, list(network.parameters()), create_graph=keep)
    return list(found)


def seen_by_the_attacker(
    network: nn.Module, images: torch.Tensor, labels: torch.Tensor, noise: float, key: bytes
) -> torch.Tensor:
    """Return the mean of the members' updates, each one step on one image, clipped, with noise."""
    changes = []
    for image, label in zip(images, labels, strict=True):
        parts = gradient(network, image[None], label[None], keep=False)
        change = -LR * torch.cat([part.flatten() for part in parts])
        changes.append(clipped(change.numpy(), CLIP))
    mean = np.mean(changes, axis=0)
    noisy = mean + noise * CLIP / len(images) * gaussian_noise(key, len(mean))
    return torch.from_numpy(noisy.astype(np.float32))


def variation(images: torch.Tensor) -> torch.Tensor:
    """Return the mean absolute difference of neighbouring pixels."""
    across = (images[..., 1:] - images[..., :-1]).abs().mean()
    return across + (images[..., 1:, :] - images[..., :-1, :]).abs().mean()


def inverted(
    network: nn.Module,
    update: torch.Tensor,
    labels: torch.Tensor,
    shape: tuple[int, ...],
    steps: int,
    smooth: float,
    seed: int,
) -> tuple[Images, float]:
    """Return the images whose gradient is most like an update, and 1 − its cosine.

    Parameters
    ----------
    smooth : float
        Weight of the total variation.
    """
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand((len(labels), *shape), generator=generator).requires_grad_()
    optimizer = torch.optim.Adam([images], lr=0.1)
    milestones = [int(steps * share) for share in (3 / 8, 5 / 8, 7 / 8)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.1)
    target = -update
    distance = math.nan
    for _ in range(steps):
        optimizer.zero_grad()
        parts = gradient(network, images, labels, keep=True)
        own = torch.cat([part.flatten() for part in parts])
        unlike = 1.0 - functional.cosine_similarity(own, target, dim=0)
        (unlike + smooth * variation(images)).backward()  # type: ignore[no-untyped-call]
        assert images.grad is not None, "the images are leaves"
        images.grad.sign_()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            images.clamp_(0.0, 1.0)
        distance = float(unlike.detach())
    return images.detach().numpy(), distance


def psnr(found: Images, image: Images) -> float:
    """Return the peak signal-to-noise ratio of images in [0, 1] in dB."""
    return -10.0 * math.log10(max(float(np.square(found - image).mean()), 1e-10))


def main() -> None:
    """Attack some clients, print the table, and draw the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dataset", default="")
    parser.add_argument("--data-root", default="", help="folder with MNIST; default: the digits")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--smooth", type=float, default=1e-3)
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dataset = options.dataset or ("mnist" if options.data_root else "digits")
    ratios: dict[str, list[float]] = {name: [] for name in ["a guess", *CASES]}
    pictures: list[list[Images]] = []
    for seed in range(options.seeds):
        keys = {"dataset": dataset, "data-root": options.data_root, "clients": 1, "seed": seed}
        data = client_data(RunConfig.from_mapping({**keys, "partition": "iid"}), 0)
        inputs, classes = np.asarray(data.x_train, np.float32), np.asarray(data.y_train, np.int64)
        drawn = np.random.default_rng(seed).permutation(len(classes))
        images = torch.from_numpy(inputs[drawn[:20]])
        labels = torch.from_numpy(classes[drawn[:20]])
        shape = tuple(images.shape[1:])
        low, high = float(images.min()), float(images.max())
        images = (images - low) / (high - low)
        network = build(options.model, shape, 10, seed)
        first = images[0].numpy()
        same = np.flatnonzero(classes[drawn[20:]] == int(labels[0]))
        others = inputs[drawn[20:][same[:20]]]
        guesses = [psnr((other - low) / (high - low), first) for other in others]
        ratios["a guess"].append(float(np.mean(guesses)))
        row = [first]
        for name, (members, noise) in CASES.items():
            key = seeded_key("inversion", seed)
            own = images[:members], labels[:members]
            update = seen_by_the_attacker(network, *own, noise, key)
            found, _ = inverted(network, update, own[1], shape, options.steps, options.smooth, seed)
            # With several images the attacker cannot tell which one is whose; the best one counts.
            best = max(found, key=lambda image: psnr(image, first))
            ratios[name].append(psnr(best, first))
            row.append(best)
        pictures.append(row)
        print(seed, {name: round(values[-1], 1) for name, values in ratios.items()}, flush=True)
    print("| what the attacker has | PSNR, dB | by seed |")
    print("|---|---:|---|")
    for name, values in ratios.items():
        listed = ", ".join(f"{value:.1f}" for value in values)
        print(f"| {name} | {np.mean(values):.1f} ± {np.std(values):.1f} | {listed} |")
    if options.out is not None:
        draw(pictures, ratios, options.out)


def draw(pictures: list[list[Images]], ratios: dict[str, list[float]], out: Path) -> None:
    """Draw the images of all seeds, a row for each."""
    names = ["the client's image", *CASES]
    size = (1.5 * len(names), 1.45 * len(pictures) + 0.3)
    figure, axes = pyplot.subplots(len(pictures), len(names), figsize=size, squeeze=False)
    for number, row in enumerate(pictures):
        for axis, name, image in zip(axes[number], names, row, strict=True):
            axis.imshow(image.reshape(image.shape[-2:]), cmap="gray", vmin=0, vmax=1)
            axis.set_xticks([])
            axis.set_yticks([])
            if not number:
                axis.set_title(name, fontsize=9)
            if name in ratios:
                axis.set_xlabel(f"{ratios[name][number]:.1f} dB", fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=100)


if __name__ == "__main__":
    main()
