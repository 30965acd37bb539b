"""Decomposed weights: compositions, steps and proximal steps of two weights by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from raceme.core.training_settings import TrainingSettings
from raceme.strategies.continual.client import Decomposition, Masks, Strengths, TaskPart
from raceme.training import models
from raceme.training.models import Network

NOBODY = torch.zeros(0, 2)
FREE = Strengths(sparsity=0.0, drift=0.0)


def one_output() -> Network:
    """A matrix with a single weight, and a bias."""
    return Network(models.build("mclr", (1,), 1))


def part(
    mask: float,
    adaptive: tuple[float, float] = (0.0, 0.0),
    held: tuple[float, ...] = (),
    borrowed: tuple[float, float] = (0.0, 0.0),
    shares: Tensor | None = None,
) -> TaskPart:
    shares = torch.zeros(0, 2) if shares is None else shares
    rows = (torch.tensor(values) for values in ([mask], adaptive, borrowed))
    return TaskPart(*rows, shares, torch.tensor(held))


def decomposed(
    own: TaskPart,
    *formers: TaskPart,
    sigmoid: bool = True,
    others: Tensor = NOBODY,
    strengths: Strengths = FREE,
) -> tuple[Decomposition, Network]:
    """σ = (2, 1)."""
    network = one_output()
    masks, shared = Masks(network, sigmoid), torch.tensor([2.0, 1.0])
    return Decomposition(network, masks, shared, own, formers, others, strengths), network


def step(made: Decomposition, network: Network, lr: float, *gradient: float) -> None:
    network.gradient.copy_(torch.tensor(gradient))
    made.descent(network, TrainingSettings(lr=lr))()


def test_apds_weights_and_their_step_by_hand() -> None:
    own = part(math.log(3), (0.1, -0.2))
    made, network = decomposed(own)
    # M = 3/4; a bias has no mask: 2 · 3/4 + 0.1 and 1 - 0.2.
    assert network.weights.tolist() == pytest.approx([1.6, 0.8])
    step(made, network, 0.1, 0.5, -1.0)
    # σ along g ⊙ M, τ along g, v along g σ M (1 - M) = 0.5 · 2 · 3/16.
    assert made.shared.tolist() == pytest.approx([2 - 0.1 * 0.375, 1 + 0.1])
    made.finish()
    assert own.adaptive.tolist() == pytest.approx([0.1 - 0.05, -0.2 + 0.1])
    assert own.mask.tolist() == pytest.approx([math.log(3) - 0.1 * 0.1875])
    mask = 1 / (1 + math.exp(-own.mask.item()))
    assert network.weights.tolist() == pytest.approx([1.9625 * mask + 0.05, 1.1 - 0.1])


def test_fedweits_weights_and_their_step_by_hand() -> None:
    others = torch.tensor([[1.0, 2.0], [0.0, -1.0]])
    own = part(0.5, (0.1, 0.0), shares=torch.tensor([[0.5, 0.25], [1.0, 2.0]]))
    made, network = decomposed(own, sigmoid=False, others=others)
    # B m + A + Σ α A_i, α by array: 1 + 0.1 + 0.5 · 1 + 1 · 0 and 1 + 0.25 · 2 + 2 · (-1).
    assert network.weights.tolist() == pytest.approx([1.6, -0.5])
    step(made, network, 0.1, 0.5, -1.0)
    made.finish()
    assert own.mask.tolist() == pytest.approx([0.5 - 0.1 * 0.5 * 2])
    shares = [0.5 - 0.1 * 0.5, 0.25 + 0.1 * 2, 1.0, 2.0 - 0.1]
    assert own.shares.reshape(-1).tolist() == pytest.approx(shares)
    assert own.borrowed.tolist() == pytest.approx([0.45, 0.45 * 2 - 1.9])
    weights = [1.975 * 0.4 + 0.05 + 0.45, 1.1 + 0.1 - 1.0]
    assert network.weights.tolist() == pytest.approx(weights)


def test_fedproxs_term_pulls_the_shared_part_to_what_was_received() -> None:
    made, network = decomposed(part(0.5), sigmoid=False, strengths=Strengths(0.0, 0.0, mu=2.0))
    step(made, network, 0.1, 1.0, 1.0)
    assert made.shared.tolist() == pytest.approx([1.95, 0.9])
    step(made, network, 0.1, 0.0, 0.0)
    assert made.shared.tolist() == pytest.approx([1.95 + 0.2 * 0.05, 0.9 + 0.2 * 0.1])


@pytest.mark.parametrize("sigmoid", [True, False])
def test_what_is_a_tasks_own_becomes_0_and_not_merely_small(sigmoid: bool) -> None:
    own, former = part(0.3, (0.1, -0.2)), part(0.3, (0.5, 0.0), (0.0, 0.0))
    made, network = decomposed(own, former, sigmoid=sigmoid, strengths=Strengths(1.5, 0.0))
    step(made, network, 0.1, 0.0, 0.0)
    made.finish()
    # η λ1 = 0.15.
    assert own.adaptive.tolist() == pytest.approx([0.0, -0.05])
    assert own.adaptive[0] == 0
    assert former.adaptive.tolist() == pytest.approx([0.35, 0.0])
    # FedWeIT's masks are sparse, APD's are not.
    assert own.mask.tolist() == pytest.approx([0.3 if sigmoid else 0.15])


def test_former_tasks_are_held_by_hand() -> None:
    former = part(0.5, (1.0, 0.0), held=(3.0, 1.0))
    made, network = decomposed(part(1.0), former, sigmoid=False, strengths=Strengths(0.0, 1.0))
    step(made, network, 0.5, 0.0, 0.0)
    # k = 1, κ = 1/2: σ = (2 - 1/2 · 1/2 · (1 - 3)) / (1 + 1/2 · 1/4) = 20/9, the residual is
    # 20/9 · 1/2 + 1 - 3 = -8/9, of which τ takes half. The bias is where it was.
    assert made.shared.tolist() == pytest.approx([20 / 9, 1.0])
    assert former.adaptive.tolist() == pytest.approx([1 + 4 / 9, 0.0])


def test_holding_is_the_proximal_step_of_the_drift() -> None:
    rng = np.random.default_rng(0)
    lr, strength = 0.3, 2.0

    def numbers(low: float = -1.0) -> tuple[float, float]:
        first, second = rng.uniform(low, 1.0, 2)
        return first, second

    formers = [part(0.7, numbers(), numbers(), numbers()) for _ in range(3)]
    before = [former.adaptive.clone() for former in formers]
    made, network = decomposed(
        part(1.0), *formers, sigmoid=False, strengths=Strengths(0.0, strength)
    )
    step(made, network, lr, 0.0, 0.0)
    # At the least of ‖x - x₀‖² / 2η + λ2 Σ ‖θ* - (σ M + τ + b)‖² its gradient is 0.
    pull = (made.shared - torch.tensor([2.0, 1.0])) / lr
    mask = torch.tensor([0.7, 1.0])
    for former, start in zip(formers, before, strict=True):
        residual = made.shared * mask + former.adaptive + former.borrowed - former.held
        pull += 2 * strength * mask * residual
        own = (former.adaptive - start) / lr + 2 * strength * residual
        assert own.tolist() == pytest.approx([0.0, 0.0], abs=1e-5)
    assert pull.tolist() == pytest.approx([0.0, 0.0], abs=1e-5)


def test_however_strongly_former_tasks_are_held_training_stays_finite() -> None:
    former = part(0.5, held=(1.0, 1.0))
    made, network = decomposed(part(1.0), former, sigmoid=False, strengths=Strengths(0.0, 1e12))
    for _ in range(20):
        step(made, network, 0.5, 1.0, -1.0)
    masks = Masks(network, sigmoid=False)
    assert former.weights(made.shared, masks).tolist() == pytest.approx([1.0, 1.0])
    assert network.weights[0] < 1.0


def test_masks_are_of_units_and_start_near_1() -> None:
    network = Network(models.build("cnn", (1, 8, 8), 4))
    masks = Masks(network, sigmoid=False)
    # 10 and 20 kernels, 50 hidden units, 4 outputs.
    assert masks.count == 84
    assert masks.first().tolist() == [1.0] * 84
    numbered = masks.of_weights(torch.arange(84.0) + 2)
    slices = network.slices
    assert numbered[slices["convolution1.weight"]].view(10, 9)[3].tolist() == [5.0] * 9
    assert set(numbered[slices["output.weight"]].view(4, 50)[1].tolist()) == {83.0}
    assert (numbered[slices["output.bias"]] == 1).all()
    summed = masks.gradient(torch.zeros(84), torch.ones(len(network.weights)))
    assert summed[0] == 9
    assert summed[83] == 50
    sigmoid = Masks(network, sigmoid=True)
    assert sigmoid.of_weights(sigmoid.first())[0].item() == pytest.approx(0.9)


@pytest.mark.parametrize("name", ["sparsity", "drift", "mu"])
def test_strengths_below_0_are_errors(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 0, got -1"):
        Strengths(**{"sparsity": 0.0, "drift": 0.0, name: -1.0})
