"""Ten kinds of fleets that were not used for tuning: (Fashion-)MNIST at 14x14 pixels.

    raceme compare --suite benchmarks/untuned_fleets.toml --data-root data

A client has 100 training and 50 test samples unless its kind says otherwise. Conflicting groups
have permuted labels, each its own permutation. alone_or_together.toml has three more kinds: each
client has its own labels, or its own shift and contrast of images, or one class as 80 % of its
samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raceme.core.config import RunConfig
from raceme.core.options import option
from raceme.datasets.images import FashionMnist, Mnist
from raceme.datasets.source import Dataset, DataShape, Indices, Source, generator
from raceme.simulation.devices import Device

TRAIN, TEST, SIDE, CLASSES = 100, 50, 14, 10
OVERLAPPING = ((0, 1, 2, 3), (0, 1, 4, 5), (2, 3, 4, 5), (0, 2, 4, 6))
"""Labels of four groups of which every two share half of theirs."""
SCALES = (1.0, 0.15, 6.0)
FEWEST, MOST = 12, 1500
"""Training samples of the smallest and of the largest client of the kind `sizes`."""
GROUPS = {"overlap": 4, "small": 20, "giant": 6, "scale": 3, "sizes": 2, "four": 4}
GROUPS |= {"hierarchy": 6, "noise": 2, "own-labels": 24, "own-images": 24, "dominant": 10}


@dataclass(frozen=True)
class FleetOptions:
    """Settings of the clients' data."""

    kind: str = option("four", "what the clients have", among=tuple(GROUPS))
    images: str = option("mnist", "what they are drawn from", among=("mnist", "fashion-mnist"))


class Fleet(Source):
    """Clients of one kind: no partition applies."""

    default_model = "mlp128"
    default_clients = 24
    has_clients = True
    fixed_shape = DataShape((1, SIDE, SIDE), CLASSES)
    options_type = FleetOptions

    def load(self, config: RunConfig) -> Dataset:
        """Return all clients' samples, shape (N, 1, 14, 14), each client's with its own labels."""
        options, clients = config.read(FleetOptions), config.clients or self.default_clients
        kind = options.kind
        mnist = (Mnist() if options.images == "mnist" else FashionMnist()).load(config)
        pixels = np.asarray(mnist.x, np.float32).reshape(-1, SIDE, 2, SIDE, 2).mean((2, 4)) / 255
        pixels = (pixels - pixels.mean()) / pixels.std()
        rng = generator(config.seed, f"untuned {kind}")
        unused = np.arange(len(mnist.y))
        groups, permutations = groups_of(kind, clients), permutations_of(kind, rng)
        sizes = [TRAIN] * clients
        if kind == "sizes":
            sizes = np.geomspace(FEWEST, MOST, clients).round().astype(int).tolist()
            rng.shuffle(sizes)
        x, y, start = [], [], 0
        for client, (group, size) in enumerate(zip(groups, sizes, strict=True)):
            suited = np.isin(mnist.y[unused], OVERLAPPING[group] if kind == "overlap" else mnist.y)
            drawn = rng.choice(unused[suited], size + TEST, replace=False)
            if kind == "dominant":
                usual = unused[mnist.y[unused] == group]
                most = rng.choice(usual, 4 * len(drawn) // 5, replace=False)
                others = drawn[mnist.y[drawn] != group][: len(drawn) - len(most)]
                drawn = rng.permutation(np.concatenate([most, others]))
            unused = unused[~np.isin(unused, drawn)]
            labels = permutations[group][mnist.y[drawn]]
            if kind == "noise" and client % 3 == 0:
                wrong = rng.permutation(size)[: size // 5]
                labels[wrong] = (labels[wrong] + rng.integers(1, CLASSES, len(wrong))) % CLASSES
            x.append(pixels[drawn] * (SCALES[group] if kind == "scale" else 1.0))
            if kind == "own-images":
                moved = np.roll(x[-1], rng.integers(-3, 4, 2), axis=(1, 2))
                x[-1] = moved * rng.uniform(0.3, 2.0)
            y.append(labels)
        users, tests = [], []
        for size in sizes:
            users.append(np.arange(start, start + size))
            tests.append(np.arange(start + size, start + size + TEST))
            start += size + TEST
        return Dataset(
            np.concatenate(x).astype(np.float32)[:, None],
            np.concatenate(y).astype(np.int64),
            num_classes=CLASSES,
            users=tuple(users),
            test_users=tuple(tests),
            groups=tuple(groups),
        )


def groups_of(kind: str, clients: int) -> list[int]:
    """Return each client's group: in turn; for ``giant`` one of 30 clients and others of two."""
    if kind == "giant":
        return [0 if client < 30 else 1 + (client - 30) // 2 for client in range(clients)]
    return [client % GROUPS[kind] for client in range(clients)]


def permutations_of(kind: str, rng: np.random.Generator) -> Sequence[Indices]:
    """Return each group's labels of the ten digits."""
    same = np.arange(CLASSES)
    if kind in ("overlap", "scale", "own-images", "dominant"):
        return [same] * GROUPS[kind]
    if kind != "hierarchy":
        return [rng.permutation(CLASSES) for _ in range(GROUPS[kind])]
    # Two tasks with three variants each: the original, and two with one pair of labels exchanged.
    tasks = [rng.permutation(CLASSES) for _ in range(2)]
    found = []
    for group in range(GROUPS[kind]):
        labels, pair = tasks[group % 2].copy(), group // 2
        for first in (2 * pair, 2 * pair + 4)[: 2 * (pair > 0)]:
            labels[[first, first + 1]] = labels[[first + 1, first]]
        found.append(labels)
    return found


def _slow(number: int, seed: int) -> list[float]:
    """Return the seconds of a task of each device: 5 for 30 % of them, else 1."""
    rng = np.random.default_rng([seed, number])
    return np.where(rng.permutation(number) < 0.3 * number, 5.0, 1.0).tolist()


def late(clients: int, seed: int) -> list[Device]:
    """Devices of which the third and fourth of every four join at 12 s."""
    return [
        Device(seconds, jitter=0.1, online=((12.0, np.inf),) if client % 4 > 1 else ())
        for client, seconds in enumerate(_slow(clients, seed))
    ]


def leaving(clients: int, seed: int) -> list[Device]:
    """Devices of which two of every four are offline from 6 to 18 s."""
    away = ((0.0, 6.0), (18.0, np.inf))
    return [
        Device(seconds, jitter=0.1, online=away if client // 4 % 2 else ())
        for client, seconds in enumerate(_slow(clients, seed))
    ]


def slow(clients: int, seed: int) -> list[Device]:
    """Devices of which 30 % are 20 times slower."""
    return [Device(20.0 if s > 1 else 1.0, jitter=0.1) for s in _slow(clients, seed)]
