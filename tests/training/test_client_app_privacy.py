"""Local differential privacy of a device, and Flower's mods around Raceme's ClientApp."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
from scipy.stats import kstest

from raceme.client_app import LocalPrivacy, client_app
from raceme.core import events
from raceme.core.config import RunConfig
from raceme.core.gaussian import gaussian_noise
from raceme.core.scheduling import RoundsParameters
from raceme.flower.messages import identify_process
from raceme.runs.experiment import resolve, training_settings
from raceme.simulation import Device, Node, VirtualGrid
from raceme.simulation.stacked import Stacked
from raceme.strategies import CASA, Plan
from raceme.strategies.fedavg import FlowerRounds
from raceme.training.models import initial_arrays

CONFIG = resolve(RunConfig.from_mapping({"clients": 4, "model": "mclr", "workers": "0"}))
PRIVATE = {"local-dp-epsilon": 50.0, "local-dp-clip": 0.5, "local-dp-seed": 3}


def context(**node: Any) -> Context:
    node = {"partition-id": 0, "num-partitions": 4, **node}
    return Context(1, 7, node, RecordDict(), CONFIG.to_mapping())


def asked(kind: str = "train", message_type: str = "train", **settings: Any) -> Message:
    identify_process()
    arrays = initial_arrays(CONFIG)
    number = {} if "server-round" in settings else {"task": 1}
    config = ConfigRecord({**training_settings(CONFIG), "kind": kind, **number, **settings})
    content = RecordDict({"arrays": arrays, "config": config})
    return Message(content, 7, message_type)


def change(reply: Message) -> np.ndarray:
    start = initial_arrays(CONFIG).to_numpy_ndarrays()
    pairs = zip(reply.content["arrays"].to_numpy_ndarrays(), start, strict=True)
    return np.concatenate([(now - then).ravel() for now, then in pairs])


def test_without_the_key_nothing_changes() -> None:
    reply = client_app()(asked(), context())
    assert "train-loss" in reply.content["metrics"]


def test_an_update_is_clipped_and_noise_of_the_stated_size_is_added() -> None:
    assert np.linalg.norm(change(client_app()(asked(), context()))) > 0.5
    # Two clipped updates differ by at most 1.0: σ = 1.0 √(2 ln(1.25 / 1e-5)) / 50.
    sigma = math.sqrt(2 * math.log(1.25e5)) / 50
    noise = noise_on(asked(), asked())
    assert noise.std() == pytest.approx(sigma, rel=0.1)
    assert abs(noise.mean()) < 5 * sigma / math.sqrt(noise.size)


def test_of_the_measurements_only_the_number_of_examples_leaves_the_device() -> None:
    reply = client_app()(asked(), context(**PRIVATE))
    assert set(reply.content["metrics"]) == {"num-examples"}


def test_noise_with_a_seed_can_be_repeated_and_without_one_cannot() -> None:
    app, other = client_app(), {k: v for k, v in PRIVATE.items() if k != "local-dp-seed"}
    first, second = (change(app(asked(), context(**PRIVATE))) for _ in range(2))
    assert first.tobytes() == second.tobytes()
    third, fourth = (change(app(asked(), context(**other))) for _ in range(2))
    assert third.tobytes() != fourth.tobytes()


@pytest.mark.parametrize("name", ["task", "server-round"])
def test_noise_differs_from_request_to_request(name: str) -> None:
    first, second = (
        noise_on(asked(**{name: number}), asked(**{name: number})) for number in (1, 2)
    )
    # Of 650 independent numbers the correlation is 0 ± 0.04.
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.2


def noise_on(private: Message, plain: Message) -> np.ndarray:
    """Return the noise in the answer to a message, with the answer to a copy without privacy."""
    update = change(client_app()(plain, context()))
    clipped = update * min(1.0, 0.5 / np.linalg.norm(update))
    noise: np.ndarray = change(client_app()(private, context(**PRIVATE))) - clipped
    return noise


def test_noise_is_the_key_stream_of_a_cipher() -> None:
    key = bytes(range(32))
    # A normal number takes four 64-bit numbers; all first ones precede all second ones.
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor().update(bytes(128))
    numbers = [number >> 11 for number in struct.unpack("<16Q", stream)]

    def pair(first: int, second: int) -> float:
        radius = math.sqrt(-2 * math.log((first + 1) / 2**53))
        angle = 2 * math.pi * second / 2**53
        return radius * (math.cos(angle) + math.sin(angle))

    expected = [
        (pair(numbers[i], numbers[8 + i]) + pair(numbers[4 + i], numbers[12 + i])) / 2
        for i in range(4)
    ]
    assert gaussian_noise(key, 4) == pytest.approx(expected)


def test_noise_is_normal() -> None:
    noise = gaussian_noise(bytes(32), 200_000)
    assert kstest(noise, "norm").pvalue > 0.01
    # Neighbours, and numbers of two blocks.
    for other in (noise[1:], noise[1 << 16 :]):
        assert abs(np.corrcoef(noise[: other.size], other)[0, 1]) < 4 / math.sqrt(other.size)


def test_an_update_that_is_not_finite_does_not_leave_the_device() -> None:
    message = asked()
    shapes = [array.shape for array in initial_arrays(CONFIG).to_numpy_ndarrays()]
    lost = [np.full(shape, np.nan, np.float32) for shape in shapes]
    names = initial_arrays(CONFIG).keys()
    arrays = {name: Array(array) for name, array in zip(names, lost, strict=True)}
    message.content["arrays"] = ArrayRecord(arrays)
    with pytest.raises(ValueError, match="not finite"):
        client_app()(message, context(**PRIVATE))


def test_noise_leaves_numpys_generator_alone() -> None:
    np.random.seed(5)
    client_app()(asked(), context(**{k: v for k, v in PRIVATE.items() if k != "local-dp-seed"}))
    drawn = np.random.random()
    np.random.seed(5)
    assert np.random.random() == drawn


@pytest.mark.parametrize("kind", ["losses", "label-counts", "lend", "scores", "train-best"])
def test_a_private_device_does_no_work_that_would_tell_more(kind: str) -> None:
    with pytest.raises(ValueError, match="local differential privacy"):
        client_app()(asked(kind, "query"), context(**PRIVATE))


@pytest.mark.parametrize(
    "node",
    [
        {"local-dp-epsilon": 0.0},
        {"local-dp-epsilon": -1.0},
        {"local-dp-epsilon": "much"},
        {"local-dp-epsilon": math.nan},
        {"local-dp-epsilon": 1.0, "local-dp-delta": 1.0},
        {"local-dp-epsilon": 1.0, "local-dp-clip": 0},
        {"local-dp-epsilon": 1.0, "local-dp-seed": -1},
        {"local-dp-clip": 1.0},
        {"local-dp-epsilom": 1.0},
        {"local-dp-epsilon": 1.0, "local-dp-clipping": 1.0},
    ],
)
def test_numbers_that_give_no_privacy_are_refused(node: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="local-dp-"):
        client_app()(asked(), context(**node))


def test_a_model_with_counters_is_refused() -> None:
    message = asked()
    counter = ArrayRecord([np.zeros(1, np.int64)], keep_input=True)
    message.content["arrays"] = ArrayRecord(
        {**message.content["arrays"], "bn.num_batches_tracked": counter["0"]}
    )
    with pytest.raises(ValueError, match="is a count"):
        client_app()(message, context(**PRIVATE))


def private_grid(**node: Any) -> VirtualGrid:
    nodes = [
        Node(100 + index, Device(1.0), {"partition-id": index, "num-partitions": 4, **node}, 100)
        for index in range(4)
    ]
    return VirtualGrid(client_app(), nodes, CONFIG.to_mapping(), seed=0)


@pytest.mark.parametrize(("ratio", "updates"), [(1.0, 1), (0.5, 4), (3.0, 1), (20.0, 25)])
def test_the_spent_budget_is_that_of_gaussian_noise(ratio: float, updates: int) -> None:
    privacy = LocalPrivacy(epsilon=ratio * math.sqrt(2 * math.log(1.25e5)))
    epsilon, mu = privacy.spent(updates), ratio * math.sqrt(updates)
    # δ is the mass of N(0, 1) above e^ε times N(-μ, 1), where the log ratio exceeds ε.
    x = np.linspace(-12, 12 + 2 * mu, 4_000_001)
    log_ratio = mu * x + mu * mu / 2
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    above = np.where(log_ratio > epsilon, density * -np.expm1(epsilon - log_ratio), 0.0)
    assert np.trapezoid(above, x) == pytest.approx(1e-5, rel=1e-3)


def test_a_small_epsilon_is_kept_and_a_large_one_is_exceeded() -> None:
    assert LocalPrivacy(epsilon=1.0).spent(1) < 1.0
    assert LocalPrivacy(epsilon=100.0).spent(1) > 250
    assert LocalPrivacy(epsilon=1.0).spent(20) < 20


def test_casa_learns_from_private_devices_and_is_repeated_bit_for_bit() -> None:
    found = []
    for _ in range(2):
        method, seen = CASA(seed=0), list[events.Event]()
        method.run(
            private_grid(**{**PRIVATE, "local-dp-epsilon": 2000.0}),
            initial_arrays(CONFIG),
            40,
            train_config=training_settings(CONFIG),
            plan=Plan(eval_every=40),
            observe=seen.append,
        )
        assert not [event for event in seen if isinstance(event, events.UpdateRejected)]
        tests = [event for event in seen if isinstance(event, events.Evaluated)]
        assert tests[-1].accuracy > tests[0].accuracy + 0.3
        found.append(method.spec.unpack(method.result.arrays).tobytes())
    assert found[0] == found[1]


def test_clients_that_are_stacked_add_noise_too() -> None:
    nodes = [
        Node(100 + index, Device(1.0), {"partition-id": index, "num-partitions": 4, **PRIVATE}, 100)
        for index in range(4)
    ]
    grid = VirtualGrid(client_app(), nodes, CONFIG.to_mapping(), seed=0, executor=Stacked())
    method, seen = CASA(seed=0), list[events.Event]()
    settings = training_settings(CONFIG)
    method.run(grid, initial_arrays(CONFIG), 4, train_config=settings, observe=seen.append)
    updates = [event for event in seen if isinstance(event, events.UpdateApplied)]
    assert len(updates) == 4
    # Only stacked clients would report a loss; private devices are not stacked.
    assert all(math.isnan(update.train_loss) for update in updates)


def test_flowers_fixed_clipping_works_with_its_own_strategy_in_rounds() -> None:
    inner = DifferentialPrivacyClientSideFixedClipping(
        FedAvg(fraction_evaluate=0.0, min_available_nodes=1, min_train_nodes=1),
        noise_multiplier=0.0,
        clipping_norm=0.25,
        num_sampled_clients=4,
    )
    nodes = [
        Node(100 + index, Device(1.0), {"partition-id": index, "num-partitions": 4}, 100)
        for index in range(4)
    ]
    app = client_app([fixedclipping_mod])
    grid = VirtualGrid(app, nodes, CONFIG.to_mapping(), seed=0)
    method, seen = FlowerRounds(inner, RoundsParameters()), list[events.Event]()
    start = initial_arrays(CONFIG)
    settings = training_settings(CONFIG)
    method.run(grid, start, 4, train_config=settings, observe=seen.append)
    assert not [event for event in seen if isinstance(event, events.UpdateRejected)]
    before, after = method.spec.unpack(start), method.spec.unpack(method.result.arrays)
    assert 0 < np.linalg.norm(after - before) <= 0.25 + 1e-4
