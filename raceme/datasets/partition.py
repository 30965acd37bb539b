"""How the samples of a dataset are dealt out to clients.

A partitioner is a pure function of the labels, the configuration and a random generator. Every
sample goes to exactly one client, and every client gets at least `MIN_SAMPLES`, enough for a split
into training and test samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.config.options import option, reads
from raceme.datasets.source import Indices

_FITTING_ROUNDS = 1000
"""Most rounds of fitting; thirty are usual, a small alpha takes more."""
MIN_SAMPLES = 5
_MOST_GROUPS = 10_000
"""More equal groups than any fleet has clients are a slip of the keyboard."""
LOG_NORMAL_SIGMA = 1.25
"""Deviation of the logarithm of log-normal sizes.

MNIST's samples on 1,000 clients then have about the mean and deviation that FedProx's paper tells
of its power-law division (69 and 106), which CSAFL's and FlexCFL's experiments take over; Zipf's
law would give one client 5,000 to 6,000.
"""

Shares = NDArray[np.float64]


@dataclass(frozen=True)
class SizeOptions:
    """What every partition reads."""

    sizes: str = option(
        "equal",
        "samples per client: equal, power-law or log-normal",
        among=("equal", "power-law", "log-normal"),
    )


@dataclass(frozen=True)
class DirichletOptions(SizeOptions):
    """How unlike the clients' shares of the labels are."""

    dirichlet_alpha: float = option(1.0, "Dirichlet concentration of labels", above=0)


@dataclass(frozen=True)
class ClassesOptions(SizeOptions):
    """How many labels a client has."""

    classes_per_client: int = option(2, "labels that one client holds", low=1)
    classes_dealt: str = option(
        "mixed",
        "which these are: mixed: any, or in-turn: client i has i, i + 1, … (FedProx's MNIST)",
        among=("mixed", "in-turn"),
    )


@dataclass(frozen=True)
class GroupOptions(SizeOptions):
    """Which groups there are among the clients."""

    groups: str = option(
        "0.2,0.2,0.3,0.3",
        "share of the clients (and labels) of each group, or a number of equal groups",
    )


@dataclass(frozen=True)
class LabelGroupOptions(GroupOptions, DirichletOptions):
    """Groups, and how unlike the clients of one group are."""


@dataclass(frozen=True)
class Partition:
    """Who has which samples.

    Attributes
    ----------
    indices : tuple[Indices, ...]
        Samples of each client, ascending.
    groups : tuple[int | None, ...]
        True group of each client, or None where the partitioner makes no groups.
    """

    indices: tuple[Indices, ...]
    groups: tuple[int | None, ...]


@reads(LabelGroupOptions)
def label_groups(labels: Indices, config: RunConfig, rng: np.random.Generator) -> Partition:
    """Groups of clients with labels of their own, Dirichlet inside each group (CASA's label skew).

    The shares in ``groups`` divide both the clients and the labels, in order. Inside a group, each
    client's shares of the group's labels are drawn from a Dirichlet distribution; how many samples
    a client has, ``sizes`` says.
    """
    check_enough(labels, config.num_clients)
    options = config.read(LabelGroupOptions)
    shares = parse_groups(options.groups)
    kinds = np.unique(labels)
    _check_groups(len(shares), len(kinds), config.num_clients)
    client_counts = largest_remainder(config.num_clients, shares)
    label_counts = largest_remainder(len(kinds), shares)
    for what, counts in (("client", client_counts), ("label", label_counts)):
        if counts.min() == 0:
            share = shares[int(np.argmin(counts))]
            raise UserError(
                f"groups '{options.groups}': a share of {share:g} of {counts.sum()} {what}s is not "
                f"even one {what}. Give larger shares or fewer groups."
            )
    group_labels = np.split(kinds, np.cumsum(label_counts)[:-1])
    weights = np.split(client_weights(config, rng), np.cumsum(client_counts)[:-1])
    indices: list[Indices] = []
    for own_labels, own_weights in zip(group_labels, weights, strict=True):
        own = np.flatnonzero(np.isin(labels, own_labels))
        check_enough(own, len(own_weights), f"their group with labels {own_labels.tolist()}")
        dealt = _spread(labels, own_labels, own_weights, options.dirichlet_alpha, rng)
        indices.extend(_with_minimum(dealt))
    groups = np.repeat(np.arange(len(shares)), client_counts)
    return _partition(indices, groups.tolist())


@reads(DirichletOptions)
def dirichlet(labels: Indices, config: RunConfig, rng: np.random.Generator) -> Partition:
    """Every client's shares of the labels drawn from a Dirichlet distribution (dirichlet-alpha)."""
    check_enough(labels, config.num_clients)
    weights = client_weights(config, rng)
    alpha = config.read(DirichletOptions).dirichlet_alpha
    dealt = _spread(labels, np.unique(labels), weights, alpha, rng)
    return _partition(_with_minimum(dealt))


@reads(ClassesOptions)
def classes(labels: Indices, config: RunConfig, rng: np.random.Generator) -> Partition:
    """Pathological label skew: every client holds exactly classes-per-client labels.

    Every label is held by about the same number of clients, which share its samples equally, or in
    the proportions of their power-law sizes. Dealt in turn, as FedProx's code does for its MNIST,
    there are only as many different clients as labels, each like its neighbours: m groups of them
    have few labels each. Dealt mixed, two labels each of ten make 45 kinds of clients.
    """
    check_enough(labels, config.num_clients)
    kinds = np.unique(labels)
    holders = _deal_labels(len(kinds), config, rng)
    weights = client_weights(config, rng)
    parts: list[list[Indices]] = [[] for _ in range(config.num_clients)]
    least = -(-MIN_SAMPLES // config.read(ClassesOptions).classes_per_client)
    for kind, clients in zip(kinds, holders, strict=True):
        own = rng.permutation(np.flatnonzero(labels == kind))
        if len(own) < least * len(clients):
            raise UserError(
                f"Too few samples of label {kind}: {len(own)} for the {len(clients)} clients that "
                f"are to hold it. Take fewer clients or more classes-per-client."
            )
        for client, part in zip(clients, divide(own, weights[clients], least), strict=True):
            parts[client].append(part)
    return _partition([np.concatenate(part) for part in parts])


@reads(SizeOptions)
def iid(labels: Indices, config: RunConfig, rng: np.random.Generator) -> Partition:
    """Samples dealt out at random: every client sees the same distribution."""
    check_enough(labels, config.num_clients)
    weights = client_weights(config, rng)
    return _partition(divide(rng.permutation(len(labels)), weights, MIN_SAMPLES))


def parse_groups(text: str) -> Shares:
    """Read the key ``groups``: shares that are positive and sum to 1, or a number of equal groups.

    Raises
    ------
    UserError
        They are not.
    """
    expected = "groups must be positive shares that sum to 1 or a number, e.g. 0.2,0.2,0.3,0.3 or 4"
    if text.strip().isdecimal() and 1 <= int(text) <= _MOST_GROUPS:
        return np.full(int(text), 1.0 / int(text))
    if text.count(",") >= _MOST_GROUPS:
        raise UserError(f"{expected}; got more than {_MOST_GROUPS:,}.")
    try:
        shares = np.array([float(part) for part in text.split(",")])
    except ValueError:
        raise UserError(f"{expected}; got '{text}'.") from None
    if not (np.all(shares > 0) and abs(shares.sum() - 1.0) < 1e-6):
        raise UserError(f"{expected}; got '{text}', which sums to {shares.sum():g}.")
    normalised: Shares = shares / shares.sum()
    return normalised


def fitting_groups(text: str, clients: int, labels: int | None = None) -> str:
    """Return the key ``groups`` with as many groups as there are clients, and labels, for them.

    Of shares that fit nothing changes. A group that would get none is joined with the smaller one
    of its neighbours, since neighbours have neighbouring labels.

    Parameters
    ----------
    text : str
        The shares.
    clients : int
        Number of clients to be divided.
    labels : int, optional
        Number of labels to be divided by the same shares.

    Raises
    ------
    UserError
        The shares cannot be read.
    """
    shares = parse_groups(text)
    totals = [clients] if labels is None else [clients, labels]
    counts = np.min([largest_remainder(total, shares) for total in totals], axis=0)
    if counts.min() > 0 or len(shares) == 1:
        return text
    empty = int(np.argmin(counts))
    beside = [i for i in (empty - 1, empty + 1) if 0 <= i < len(shares)]
    first = min(empty, min(beside, key=lambda i: float(shares[i])))
    joined = [*shares[:first], shares[first] + shares[first + 1], *shares[first + 2 :]]
    # As text, since that is what is read again: rounding decides between equal remainders.
    return fitting_groups(",".join(f"{share:.9g}" for share in joined), clients, labels)


def largest_remainder(total: int, shares: Shares) -> Indices:
    """Divide `total` things by shares that sum to 1: whole parts first, then largest remainders."""
    # Rounded, or 0.3 of 10 would be 2 and a remainder of almost 1 next to a real remainder.
    exact = np.round(shares * total, 9)
    counts = np.floor(exact).astype(np.int64)
    # Stable, so that of equal remainders the first one wins.
    order = np.argsort(counts - exact, kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts


def check_enough(samples: Indices, clients: int, what: str = "the dataset") -> None:
    """Raise UserError if there are not enough samples for the minimum of every client."""
    if len(samples) < clients * MIN_SAMPLES:
        raise UserError(
            f"Too many clients: {clients} of them need {clients * MIN_SAMPLES} samples, "
            f"{MIN_SAMPLES} each, but {what} has only {len(samples)}. Take fewer clients."
        )


def _check_groups(groups: int, labels: int, clients: int) -> None:
    """Raise UserError if there are more groups than labels or clients to put into them."""
    for what, number in (("labels", labels), ("clients", clients)):
        if groups > number:
            raise UserError(
                f"groups names {groups} groups, but there are only {number} {what}: "
                f"give at most {number} shares."
            )


def client_weights(config: RunConfig, rng: np.random.Generator) -> Shares:
    """Return how much of the data each client is to get, relative to the others.

    The power law is Zipf's: 1, 1/2, 1/3 … in a random order of the clients.
    """
    sizes = config.read(SizeOptions).sizes
    if sizes == "equal":
        return np.ones(config.num_clients)
    if sizes == "log-normal":
        return rng.lognormal(0.0, LOG_NORMAL_SIGMA, config.num_clients)
    ranks = 1.0 + rng.permutation(config.num_clients)
    return np.asarray(1.0 / ranks, np.float64)


def _spread(
    labels: Indices, kinds: Indices, weights: Shares, alpha: float, rng: np.random.Generator
) -> list[Indices]:
    """Deal samples to clients whose shares of the labels are drawn from a Dirichlet distribution.

    What is drawn is scaled until every client has the amount that its weight says and every
    sample has one owner; the odds between labels and clients stay as they were drawn.
    """
    own = [rng.permutation(np.flatnonzero(labels == kind)) for kind in kinds]
    amounts = np.array([len(samples) for samples in own], np.float64)
    drawn = rng.dirichlet(np.full(len(kinds), alpha), size=len(weights))
    dealt = _fitted(drawn, weights / weights.sum() * amounts.sum(), amounts)
    parts: list[list[Indices]] = [[] for _ in weights]
    for samples, column in zip(own, dealt.T, strict=True):
        bounds = np.cumsum(largest_remainder(len(samples), column / column.sum()))[:-1]
        for part, chosen in zip(parts, np.split(samples, bounds), strict=True):
            part.append(chosen)
    return [np.concatenate(part) for part in parts]


def _fitted(table: Shares, rows: Shares, columns: Shares) -> Shares:
    """Scale the rows and columns of a table in turn until they have the sums that are wanted.

    Iterative proportional fitting (Deming and Stephan 1940). A tiny amount in every cell keeps a
    table that a small alpha has drawn almost empty from having no solution.
    """
    fitted = table + 1e-9
    for _ in range(_FITTING_ROUNDS):
        fitted *= (rows / fitted.sum(axis=1))[:, None]
        fitted *= columns / fitted.sum(axis=0)
        if np.allclose(fitted.sum(axis=1), rows, rtol=1e-3):
            break
    return fitted


def _with_minimum(parts: list[Indices]) -> list[Indices]:
    """Give clients that have too few samples some of those of the client that has the most."""
    parts = list(parts)
    sizes = np.array([len(part) for part in parts])
    while sizes.min() < MIN_SAMPLES:
        poor, rich = int(np.argmin(sizes)), int(np.argmax(sizes))
        moved = min(MIN_SAMPLES - sizes[poor], sizes[rich] - MIN_SAMPLES)
        # From the front: one label of the rich client, as in a partition that Dirichlet drew.
        parts[poor] = np.concatenate([parts[poor], parts[rich][:moved]])
        parts[rich] = parts[rich][moved:]
        sizes[poor] += moved
        sizes[rich] -= moved
    return parts


def _deal_labels(num_labels: int, config: RunConfig, rng: np.random.Generator) -> list[Indices]:
    """Return the clients that hold each label, `classes_per_client` different labels per client."""
    wanted = config.read(ClassesOptions).classes_per_client
    if wanted > num_labels:
        raise UserError(
            f"classes-per-client is {wanted}, but the data have only {num_labels} labels."
        )
    if config.num_clients * wanted < num_labels:
        raise UserError(
            f"{config.num_clients} clients of {wanted} labels cannot hold all {num_labels} labels: "
            f"take at least {-(-num_labels // wanted)} clients or more classes-per-client."
        )
    clients = np.arange(config.num_clients)
    if config.read(ClassesOptions).classes_dealt == "in-turn":
        if config.num_clients + wanted - 1 < num_labels:
            raise UserError(
                f"{config.num_clients} clients that have {wanted} labels in turn have not all "
                f"{num_labels}: take at least {num_labels - wanted + 1} clients, or deal mixed."
            )
        return [clients[(label - clients) % num_labels < wanted] for label in range(num_labels)]
    holders: list[list[int]] = [[] for _ in range(num_labels)]
    for client in clients:
        # The labels that have the fewest holders so far; ties in random order.
        order = rng.permutation(num_labels)
        counts = np.array([len(holders[label]) for label in order])
        for label in order[np.argsort(counts, kind="stable")][:wanted]:
            holders[label].append(client)
    return [np.array(clients) for clients in holders]


def divide(samples: Indices, weights: Shares, least: int) -> list[Indices]:
    """Divide samples by weight, after each part has got the least that it must have."""
    left = len(samples) - least * len(weights)
    counts = least + largest_remainder(left, weights / weights.sum())
    return np.split(samples, np.cumsum(counts)[:-1])


def _partition(parts: Sequence[Indices], groups: Sequence[int | None] | None = None) -> Partition:
    indices = tuple(np.sort(part) for part in parts)
    return Partition(indices, tuple(groups) if groups is not None else (None,) * len(indices))
