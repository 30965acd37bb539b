"""Noise of binary trees for sums that are published again and again (DP-FTRL).

Kairouz et al., "Practical and Private (Deep) Learning without Sampling or Shuffling", ICML 2021,
algorithm 1 with the tree of Dwork et al. (STOC 2010). Leaf t of a tree is what version t adds to
the model, and a node of level l is the sum of the 2^l leaves below it, with noise. After n leaves
the sum is made of one node for each 1 in the binary number n, so its noise has a variance of at
most log2(n) + 1 of a node's, in place of n. A leaf is part of a node of each level.

A tree has 2^H leaves; the next one begins with the sum of the former. Nodes are numbered over all
trees: node (l, i) is the sum of the leaves from i 2^l on.
"""

from __future__ import annotations

from collections.abc import Mapping

Node = tuple[int, int]
"""Level, from 0 for leaves, and number from 0."""


def path(leaf: int, height: int) -> list[Node]:
    """Return the nodes that contain a leaf, in a tree of 2^height leaves."""
    return [(level, leaf >> level) for level in range(height + 1)]


def renewed(leaf: int, height: int) -> tuple[Node, list[Node]]:
    """Return the node that a sum has from a leaf on, and those that it has no more.

    The leaf ends the nodes of level 0 to j on its path. The one of level j takes the place of their
    left neighbours, of which the sum consisted before.
    """
    ended = 0
    while ended < height and leaf >> ended & 1:
        ended += 1
    return (ended, leaf >> ended), [(level, (leaf >> level) - 1) for level in range(ended)]


def cost(leaves: Mapping[int, float], height: int) -> float:
    """Return μ² z² of a client in a tree: Σ over nodes of the square of its part in the node.

    All nodes of the tree count, also those that are not complete so far.

    Parameters
    ----------
    leaves : Mapping[int, float]
        The client's part in each leaf, in units of what the noise is relative to.
    height : int
        H: the tree has 2^H leaves.
    """
    parts: dict[Node, float] = {}
    for leaf, part in leaves.items():
        for node in path(leaf, height):
            parts[node] = parts.get(node, 0.0) + part
    return sum(part * part for part in parts.values())
