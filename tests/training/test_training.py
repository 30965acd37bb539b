from __future__ import annotations

import platform

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn
from torch.nn.utils import weight_norm

from raceme.core.messages import InvalidModelError, ModelSpec, from_array, to_array
from raceme.core.training_settings import TrainingSettings
from raceme.training import models
from raceme.training.local import (
    epochs,
    evaluate,
    losses,
    optimiser_of,
    random_moves,
    sgd,
    shifted_and_mirrored,
    step,
    train,
)
from raceme.training.models import Network, Samples


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def mclr(features: int = 2, classes: int = 2) -> Network:
    network = Network(models.build("mclr", (features,), classes))
    network.weights.zero_()
    return network


def random_samples(count: int, features: int = 2, classes: int = 2) -> Samples:
    x = rng(count).normal(size=(count, features)).astype(np.float32)
    return Samples(x, rng(count + 1).integers(0, classes, count))


@pytest.mark.parametrize("count", [2, 3, 8])
def test_halves_of_samples_have_nothing_in_common(count: int) -> None:
    samples = Samples(np.arange(count, dtype=np.float32)[:, None], np.zeros(count, np.int64))
    halves = [samples.every_other(first).x.flatten().tolist() for first in (0, 1)]
    assert halves == [list(range(0, count, 2)), list(range(1, count, 2))]
    assert len(random_samples(1).every_other(1)) == 1


def test_balanced_samples_have_all_classes_equally_often() -> None:
    x = np.arange(9, dtype=np.float32)[:, None]
    found = Samples(x, np.array([0, 0, 0, 0, 0, 1, 2, 2, 0])).balanced()
    # Three of each class: evenly spaced among the six of class 0, repeated for rare classes.
    assert found.y.tolist() == [0, 1, 2] * 3
    assert found.x.flatten().tolist() == [0, 5, 6, 2, 5, 6, 4, 5, 7]
    assert Samples(x[:5], np.array([0, 1, 0, 0, 0])).balanced().y.tolist() == [0, 1, 0, 1, 0]
    quantities = Samples(x, x[:, 0])
    assert quantities.balanced() is quantities


def reference(
    weights: np.ndarray, x: np.ndarray, y: np.ndarray, classes: int
) -> tuple[float, np.ndarray]:
    """Flat loss and gradient of logistic regression: the matrix row by row, then the bias."""
    matrix = weights[:-classes].reshape(classes, -1)
    scores = x @ matrix.T + weights[-classes:]
    shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    errors = (shares - np.eye(classes)[y]) / len(y)
    loss = -np.log(shares[np.arange(len(y)), y]).mean()
    return float(loss), np.concatenate([(errors.T @ x).ravel(), errors.sum(axis=0)])


# One sample x = (1, 2) of class 1, two classes, all weights zero. Both classes get the share 1/2,
# so the loss is log 2, the errors are (1/2, -1/2), and the gradient is
# (1/2, 1; -1/2, -1) for the matrix and (1/2, -1/2) for the bias.
X = np.array([[1.0, 2.0]], np.float32)
Y = np.array([1])
MASK = ArrayRecord(
    {
        "output.weight": to_array(np.array([[1, 0], [1, 0]], np.uint8)),
        "output.bias": to_array(np.array([1, 0], np.uint8)),
    }
)
GRADIENT = np.array([0.5, 1.0, -0.5, -1.0, 0.5, -0.5], np.float32)


def test_one_step_by_hand() -> None:
    network = mclr()
    loss = train(network, Samples(X, Y), TrainingSettings(lr=0.1), rng())
    assert loss == pytest.approx(np.log(2))
    assert network.weights.numpy() == pytest.approx(-0.1 * GRADIENT)


def test_the_first_step_does_not_feel_the_proximal_term_and_the_second_does_by_hand() -> None:
    network, free = mclr(), mclr()
    train(free, Samples(X, Y), TrainingSettings(lr=0.1, local_epochs=2), rng())
    train(network, Samples(X, Y), TrainingSettings(lr=0.1, local_epochs=2, proximal_mu=0.5), rng())
    # At the second step the weights are -0.1 g away from the start: the term adds 0.5 * -0.1 g to
    # the gradient, and so 0.1 * 0.05 g to the weights.
    assert (network.weights - free.weights).numpy() == pytest.approx(0.005 * GRADIENT, rel=1e-4)


def test_epochs_and_mini_batches_agree_with_numpy() -> None:
    samples = random_samples(23, features=5, classes=3)
    network = Network(models.build("mclr", (5,), 3, seed=1))
    weights = network.weights.numpy().astype(np.float64)
    x, y = samples.x.numpy().astype(np.float64), samples.y.numpy()
    loss = train(network, samples, TrainingSettings(lr=0.3, batch_size=10, local_epochs=2), rng(7))
    # The same order: the first random number of a task seeds torch, then follow one permutation per
    # epoch, and mini-batches of 10, 10 and 3 samples.
    shuffle = rng(7)
    shuffle.integers(2**63)
    total = 0.0
    for _ in range(2):
        order = shuffle.permutation(23)
        for batch in (order[:10], order[10:20], order[20:]):
            batch_loss, gradient = reference(weights, x[batch], y[batch], 3)
            weights -= 0.3 * gradient
            total += batch_loss * len(batch)
    assert network.weights.numpy() == pytest.approx(weights, abs=1e-5)
    assert loss == pytest.approx(total / 46, abs=1e-5)


def test_a_strong_proximal_term_keeps_the_model_near_its_start() -> None:
    samples = random_samples(40, 4, 3)
    distances = []
    for mu in (0.0, 1.0, 9.0):
        network = mclr(4, 3)
        train(network, samples, TrainingSettings(lr=0.1, local_epochs=20, proximal_mu=mu), rng())
        distances.append(float(network.weights.norm()))
    assert distances[0] > 2 * distances[1] > 4 * distances[2] > 0


def test_masked_weights_stay_as_they_were() -> None:
    network = mclr()
    train(network, Samples(X, Y), TrainingSettings(lr=0.1), rng(), {"mask": MASK})
    assert network.weights.numpy() == pytest.approx(-0.1 * GRADIENT * [1, 0, 1, 0, 1, 0])


# --- optimisers, weight decay, steps ------------------------------------------------------------


def two_gradients(lr: float, decay: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """The gradient of the one sample at zero, and after a plain step from there."""
    first = reference(np.zeros(6), X, Y, 2)[1]
    return first, reference(-lr * first, X, Y, 2)[1] - decay * lr * first


def test_momentum_adds_to_a_step_its_share_of_the_former_one_by_hand() -> None:
    network = mclr()
    settings = TrainingSettings(lr=0.1, local_epochs=2, optimizer="momentum", momentum=0.5)
    train(network, Samples(X, Y), settings, rng())
    first, second = two_gradients(0.1)
    # w2 = -lr g1 - lr (0.5 g1 + g2).
    assert network.weights.numpy() == pytest.approx(-0.1 * (1.5 * first + second), rel=1e-5)


def test_adams_first_step_goes_by_the_sign_of_the_gradient() -> None:
    network = mclr()
    train(network, Samples(X, Y), TrainingSettings(lr=0.1, optimizer="adam"), rng())
    assert network.weights.numpy() == pytest.approx(-0.1 * np.sign(GRADIENT), rel=1e-5)


def test_an_optimiser_remembers_nothing_of_the_work_before() -> None:
    settings = TrainingSettings(lr=0.1, optimizer="momentum")
    network, again = mclr(), mclr()
    train(network, Samples(X, Y), settings, rng())
    once = network.weights.clone()
    network.weights.zero_()
    train(network, Samples(X, Y), settings, rng())
    train(again, Samples(X, Y), settings, rng())
    assert torch.equal(network.weights, once)
    assert torch.equal(again.weights, once)


def test_weight_decay_pulls_to_zero_by_hand() -> None:
    network = mclr()
    settings = TrainingSettings(lr=0.1, local_epochs=2, weight_decay=0.5)
    train(network, Samples(X, Y), settings, rng())
    first, second = two_gradients(0.1, decay=0.5)
    assert network.weights.numpy() == pytest.approx(-0.1 * (first + second), rel=1e-5)


def test_weight_decay_of_kernels_leaves_biases_alone() -> None:
    network = mclr()
    settings = TrainingSettings(lr=0.1, local_epochs=2, weight_decay=0.5, weight_decay_on="kernels")
    train(network, Samples(X, Y), settings, rng())
    first, second = two_gradients(0.1, decay=0.5)
    # The two biases come last, and have no weight decay.
    second[4:] = two_gradients(0.1)[1][4:]
    assert network.weights.numpy() == pytest.approx(-0.1 * (first + second), rel=1e-5)
    assert mclr().kernels.tolist() == [True] * 4 + [False] * 2


def test_augmented_images_are_crops_of_reflected_ones_by_hand() -> None:
    images = rng().normal(size=(2, 6, 10)).astype(np.float32)
    x = torch.from_numpy(np.tile(images, (600, 1, 1, 1)))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = shifted_and_mirrored(x, random_moves(len(x)))
    assert found.shape == x.shape
    # The content of a crop identifies its position.
    padded = np.pad(images, ((0, 0), (4, 4), (4, 4)), mode="reflect")
    crops = {
        crop[:, :, ::way].tobytes(): (down, across, way)
        for down in range(9)
        for across in range(9)
        for crop in [padded[:, down : down + 6, across : across + 10]]
        for way in (1, -1)
    }
    assert len(crops) == 2 * 9 * 9
    drawn = [crops[image.numpy().tobytes()] for image in found.contiguous()]
    assert {d for d, _, _ in drawn} == {a for _, a, _ in drawn} == set(range(9))
    assert 250 < sum(way == -1 for _, _, way in drawn) < 350
    assert len(set(drawn)) > 140


def test_training_on_augmented_images_sees_others_in_each_epoch() -> None:
    samples = Samples(rng().normal(size=(4, 1, 6, 6)).astype(np.float32), np.array([0, 1, 0, 1]))
    seen = list[torch.Tensor]()
    for augment in (False, True):
        settings = TrainingSettings(0.1, batch_size=4, local_epochs=2, augment=augment)
        network = Network(models.build("mclr", (1, 6, 6), 2))
        train(network, samples, settings, rng(), before_step=lambda x, y: seen.append(x.clone()))
    plain, again, first, second = (batch.sum(dim=(1, 2, 3)).sort().values for batch in seen)
    assert torch.allclose(plain, again)
    assert not torch.isclose(first, plain).all()
    assert not torch.isclose(first, second).all()


@pytest.mark.parametrize("mu", [0.0, 0.3])
def test_local_training_is_that_of_flowers_niid_bench(mu: float) -> None:
    """Its loop: torch's SGD with momentum and weight decay, and FedProx's term in the loss."""
    x = rng(3).normal(size=(30, 1, 28, 28)).astype(np.float32)
    y = rng(4).integers(0, 10, 30)
    network = Network(models.build("lenet5", (1, 28, 28), 10, seed=1))
    module = models.build("lenet5", (1, 28, 28), 10, seed=1)
    received = [parameter.detach().clone() for parameter in module.parameters()]
    decay = {"momentum": 0.9, "weight_decay": 0.01}
    settings = TrainingSettings(
        0.05, batch_size=8, local_epochs=2, optimizer="momentum", proximal_mu=mu, **decay
    )
    train(network, Samples(x, y, channels_last=True), settings, rng(7))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, **decay)
    shuffle = rng(7)
    shuffle.integers(2**63)
    for order in (shuffle.permutation(30), shuffle.permutation(30)):
        for batch in np.split(order, [8, 16, 24]):
            optimizer.zero_grad()
            loss = nn.CrossEntropyLoss()(module(torch.from_numpy(x[batch])), torch.tensor(y[batch]))
            pairs = zip(module.parameters(), received, strict=True)
            loss += mu / 2 * sum(torch.norm(own - other) ** 2 for own, other in pairs)
            loss.backward()
            optimizer.step()
    expected = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
    assert network.weights.numpy() == pytest.approx(expected.numpy(), abs=1e-5)
    start = torch.cat([parameter.reshape(-1) for parameter in received])
    assert float((expected - start).abs().max()) > 0.01


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_no_optimiser_moves_what_a_mask_freezes(optimizer: str) -> None:
    network = mclr()
    network.weights.fill_(0.5)
    settings = TrainingSettings(
        0.1, local_epochs=3, optimizer=optimizer, weight_decay=0.1, proximal_mu=0.1
    )
    train(network, random_samples(20), settings, rng(), {"mask": MASK})
    assert (network.weights == 0.5).tolist() == [False, True, False, True, False, True]


def test_local_steps_are_so_many_mini_batches_through_the_epochs_they_take() -> None:
    samples = random_samples(23, features=5, classes=3)
    network = Network(models.build("mclr", (5,), 3, seed=1))
    weights = network.weights.numpy().astype(np.float64)
    x, y = samples.x.numpy().astype(np.float64), samples.y.numpy()
    loss = train(network, samples, TrainingSettings(lr=0.3, local_steps=5), rng(7))
    # Three mini-batches of the first epoch, of 10, 10 and 3 samples, and two of the second.
    shuffle = rng(7)
    shuffle.integers(2**63)
    first, second = shuffle.permutation(23), shuffle.permutation(23)
    total = 0.0
    for batch in (first[:10], first[10:20], first[20:], second[:10], second[10:20]):
        batch_loss, gradient = reference(weights, x[batch], y[batch], 3)
        weights -= 0.3 * gradient
        total += batch_loss * len(batch)
    assert network.weights.numpy() == pytest.approx(weights, abs=1e-5)
    assert loss == pytest.approx(total / 43, abs=1e-5)


def test_fewer_local_steps_than_an_epoch_has_end_before_it_does() -> None:
    (order,) = epochs(23, TrainingSettings(lr=0.1, local_steps=2), False, rng(3))
    assert order.tolist() == rng(3).permutation(23)[:20].tolist()


def test_a_whole_batch_counts_as_one_step_however_large_it_might_be() -> None:
    settings = TrainingSettings(lr=0.1, batch_size=100, local_steps=3)
    assert [len(order) for order in epochs(23, settings, False, rng())] == [23, 23, 23]


def test_the_loss_of_each_sample_has_the_mean_of_the_test() -> None:
    network = Network(models.build("mlp", (2,), 3, seed=2))
    samples = random_samples(300, 2, 3)
    measured = losses(network, samples)
    assert measured.shape == (300,)
    assert measured.dtype == np.float32
    assert measured.mean() == pytest.approx(evaluate(network, samples)[1], rel=1e-5)
    network.weights.zero_()
    assert losses(network, samples) == pytest.approx(np.log(3))


@pytest.mark.parametrize("name", ["mclr", "mlp", "cnn"])
def test_the_same_seed_gives_the_same_bits(name: str) -> None:
    x = rng().normal(size=(25, 1, 8, 8)).astype(np.float32)
    samples = Samples(x, np.arange(25) % 4, channels_last=name == "cnn")
    results = []
    for seed in (1, 1, 2):
        network = Network(models.build(name, (1, 8, 8), 4))
        loss = train(network, samples, TrainingSettings(lr=0.1), rng(seed))
        results.append((loss, network.weights.numpy().tobytes()))
    assert results[0] == results[1]
    assert results[0][1] != results[2][1]


class WithSpareLayers(nn.Module):
    """A large network with a frozen layer and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 256)
        self.frozen.requires_grad_(False)
        self.hidden = nn.Linear(256, 512)
        self.unused = nn.Linear(3, 5)
        self.output = nn.Linear(512, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.output(self.hidden(self.frozen(x.flatten(1)).relu()).relu())
        return values


@pytest.mark.parametrize("name", ["mclr", "cnn5x5", "spare layers"])
@pytest.mark.parametrize("weighted", [False, True])
def test_plain_steps_are_those_along_the_flat_gradient_bit_by_bit(
    name: str, weighted: bool
) -> None:
    samples = Samples(rng().normal(size=(25, 1, 8, 8)).astype(np.float32), np.arange(25) % 4)
    weights = torch.linspace(0.1, 2.0, 25) if weighted else None
    results = []
    for descent in (optimiser_of, sgd):
        torch.manual_seed(5)
        own = name == "spare layers"
        network = Network(WithSpareLayers() if own else models.build(name, (1, 8, 8), 4))
        assert name == "mclr" or len(network.weights) >= 2**16
        before = network.weights.clone()
        settings = TrainingSettings(lr=0.1)
        loss = train(network, samples, settings, rng(3), descent=descent, weights=weights)
        results.append((loss, network.weights.numpy().tobytes()))
        moved = [not torch.equal(network.weights[s], before[s]) for s in network.slices.values()]
        assert moved == [not key.startswith(("frozen", "unused")) for key in network.slices]
    assert results[0] == results[1]


def test_dropout_is_seeded_by_the_task_and_torchs_own_generator_stays_as_it_was() -> None:
    def trained(seed: int) -> torch.Tensor:
        torch.manual_seed(99)
        module = nn.Sequential(nn.Linear(2, 16), nn.Dropout(0.5), nn.Linear(16, 2))
        torch.manual_seed(seed)  # earlier use of the generator must not matter
        before = torch.get_rng_state()
        network = Network(module)
        train(network, random_samples(20), TrainingSettings(lr=0.1), rng(3))
        assert torch.equal(torch.get_rng_state(), before)
        return network.weights

    assert torch.equal(trained(1), trained(2))


def test_training_lowers_the_loss_and_finds_separable_classes() -> None:
    x = np.repeat([[2.0, 0.0], [-2.0, 0.0]], 30, axis=0) + rng().normal(0, 0.3, (60, 2))
    samples = Samples(x.astype(np.float32), np.repeat([0, 1], 30))
    network = mclr()
    before = evaluate(network, samples)
    train(network, samples, TrainingSettings(lr=0.5, local_epochs=5), rng())
    accuracy, loss = evaluate(network, samples)
    assert before[1] == pytest.approx(np.log(2))
    assert accuracy == 1.0
    assert loss < 0.1


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1000])
def test_evaluation_in_batches_is_evaluation_of_all(count: int) -> None:
    network = Network(models.build("mlp", (2,), 3, seed=2))
    samples = random_samples(count, 2, 3)
    accuracy, loss = evaluate(network, samples)
    with torch.no_grad():
        scores = network.module(samples.x)
        expected = nn.functional.cross_entropy(scores, samples.y)
    assert accuracy == pytest.approx(float((scores.argmax(1) == samples.y).float().mean()))
    assert loss == pytest.approx(float(expected), rel=1e-5)


CONVOLUTIONS: list[tuple[nn.Module, int]] = [
    (models.build("cnn", (3, 24, 24), 5), 5),
    (models.build("cnn6", (3, 24, 24), 5), 0),
    (
        nn.Sequential(
            nn.Conv2d(3, 4, (3, 5), bias=False),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1, ceil_mode=True),
            nn.Conv2d(4, 8, 3, stride=2, padding=1, dilation=2, groups=2),
            nn.MaxPool2d(2),
            nn.BatchNorm2d(8),
            nn.Flatten(),
        ),
        5,
    ),
    (nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.MaxPool2d(2), nn.Flatten()), 0),
    (nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, dilation=2), nn.Flatten()), 0),
    (nn.Sequential(weight_norm(nn.Conv2d(3, 4, 3)), nn.MaxPool2d(2), nn.Flatten()), 0),
    (nn.Sequential(nn.MaxPool2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(432, 5)), 1),
]


@pytest.mark.parametrize(("module", "first"), CONVOLUTIONS)
def test_a_test_has_the_outputs_of_the_network_in_whatever_layout(
    module: nn.Module, first: int
) -> None:
    network = Network(module)
    samples = Samples(rng().normal(size=(9, 3, 24, 24)).astype(np.float32), np.zeros(9, np.int64))
    x = samples.shaped(samples.x)
    network.module.eval()
    with torch.inference_mode():
        torch.testing.assert_close(network.outputs(x), network.module(x), rtol=1e-5, atol=1e-6)
        if platform.machine() in ("x86_64", "AMD64"):
            assert len(network._first) == first
        network.weights.mul_(2)  # the layout must follow changes of the weights
        torch.testing.assert_close(network.outputs(x), network.module(x), rtol=1e-5, atol=1e-6)


def test_images_are_the_same_in_any_order_of_memory() -> None:
    x = rng().normal(size=(30, 3, 8, 8)).astype(np.float32)
    y = np.arange(30) % 5
    results = []
    for channels_last in (False, True):
        network = Network(models.build("cnn", (3, 8, 8), 5))
        samples = Samples(x, y, channels_last)
        train(network, samples, TrainingSettings(lr=0.1), rng())
        results.append((network.weights.numpy(), evaluate(network, samples)[1]))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-5)
    assert results[0][1] == pytest.approx(results[1][1], abs=1e-4)


def test_weights_of_all_layers_lie_in_one_vector() -> None:
    network = Network(models.build("mlp", (2,), 2))
    network.weights.fill_(0.25)
    for parameter in network.module.parameters():
        assert (parameter == 0.25).all()
    step(network, *(torch.from_numpy(values) for values in (X, Y)), lr=0.0)
    parameters = list(network.module.parameters())
    together = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
    assert torch.equal(together, network.gradient)
    assert network.gradient.abs().sum() > 0


# --- models as records --------------------------------------------------------------------------


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def test_all_arrays_of_batch_normalisation_are_known_by_name() -> None:
    layer = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert Network(normalised()).batch_norm == tuple(f"1.{name}" for name in layer)
    assert Network(nn.BatchNorm1d(2)).batch_norm == layer
    bare = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    assert Network(bare).batch_norm == ("1.weight", "1.bias")
    assert Network(nn.Sequential(nn.GroupNorm(1, 2), nn.Linear(2, 2))).batch_norm == ()


def test_some_arrays_can_be_kept_and_restored() -> None:
    network = Network(normalised())
    network.weights.fill_(2.0)
    kept = network.keep(network.batch_norm)
    network.weights.fill_(3.0)
    network.restore(kept)
    values = {name: set(array.flat) for name, array in record_of(network.module).items()}
    assert values["1.weight"] == values["1.bias"] == {2.0}
    assert values["0.weight"] == values["2.weight"] == {3.0}
    with pytest.raises(InvalidModelError, match=r"no arrays \['extra'\]"):
        network.restore(as_record({"extra": np.zeros(2, np.float32)}))


def record_of(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: values.numpy().copy() for name, values in module.state_dict().items()}


def as_record(arrays: dict[str, np.ndarray]) -> ArrayRecord:
    return ArrayRecord({name: to_array(values) for name, values in arrays.items()})


def test_a_model_goes_in_and_comes_out_in_the_order_and_types_it_came() -> None:
    arrays = {
        "output.bias": np.array([1.0, 2.0], np.float64),
        "output.weight": np.arange(4, dtype=np.float16).reshape(2, 2),
    }
    network = mclr()
    spec = network.read(as_record(arrays))
    assert network.weights.tolist() == [0, 1, 2, 3, 1, 2]
    written = network.write(spec)
    assert ModelSpec.of(written) == ModelSpec.of(as_record(arrays)) == spec
    for name, values in arrays.items():
        assert np.array_equal(from_array(written[name]), values)


def test_a_written_model_does_not_change_when_training_goes_on() -> None:
    network = mclr()
    written = network.write(network.read(as_record(record_of(network.module))))
    train(network, Samples(X, Y), TrainingSettings(lr=0.1), rng())
    assert not from_array(written["output.weight"]).any()


def test_buffers_of_batch_normalisation_travel_with_the_model() -> None:
    torch.manual_seed(0)
    network, other = Network(normalised()), Network(normalised())
    samples = random_samples(21)
    spec = network.read(as_record(record_of(network.module)))
    train(network, samples, TrainingSettings(lr=0.1, batch_size=10), rng())
    written = network.write(spec)
    # 21 samples are two mini-batches of 10, and a
    # single one, which has no variance and is left out.
    assert from_array(written["1.num_batches_tracked"]) == 2
    assert from_array(written["1.running_mean"]).any()
    other.read(written)
    assert evaluate(other, samples) == evaluate(network, samples)


def test_batch_normalisation_with_single_samples_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 2 samples; this client has 1 sample and"):
        train(Network(normalised()), random_samples(1), TrainingSettings(lr=0.1), rng())
    with pytest.raises(ValueError, match="batch-size 1"):
        train(
            Network(normalised()), random_samples(4), TrainingSettings(lr=0.1, batch_size=1), rng()
        )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"output.weight": np.zeros((3, 2), np.float32)}, r"'output.weight' is .*\(3, 2\)"),
        ({"output.weight": np.full((2, 2), "a")}, "'output.weight' is <U1"),
        ({"extra": np.zeros(2, np.float32)}, "this client's network has"),
    ],
)
def test_arrays_of_another_model_are_refused(changed: dict[str, np.ndarray], message: str) -> None:
    network = mclr()
    with pytest.raises(InvalidModelError, match=message):
        network.read(as_record(record_of(network.module) | changed))


def test_a_missing_array_is_refused() -> None:
    with pytest.raises(InvalidModelError, match="has the arrays"):
        mclr().read(as_record({"output.bias": np.zeros(2, np.float32)}))
