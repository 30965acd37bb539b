from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.messages import ModelSpec, from_array
from raceme.core.registry import MODELS
from raceme.datasets.source import DataShape
from raceme.training import models

OWN = """
import torch
from torch import nn

def good(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))

def doubles(input_shape, num_classes):
    return good(input_shape, num_classes).double()

def normalised(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, num_classes))

def wrong_width(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes + 1))

def wrong_input(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(63, num_classes))

def no_network(input_shape, num_classes):
    return "network"

def no_tensor(input_shape, num_classes):
    class Pair(nn.Module):
        def forward(self, x):
            return x, x
    return Pair()

def misspelt(input_shape, num_classes):
    return nm.Linear(64, 10)


def crash(input_shape, num_classes):
    raise RuntimeError("out of ideas")

def frozen(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes)).requires_grad_(False)

class Masked(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self.register_buffer("mask", mask)
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x):
        x = x.flatten(1)
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return self.linear((x - self.mean) * self.mask)

def masked(input_shape, num_classes):
    return Masked(torch.arange(64) > 9)

def infinite(input_shape, num_classes):
    return Masked(torch.full((64,), float("-inf")))

def of_ids(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.EmbeddingBag(64, 10))

number = 3
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A user's own module in the current folder, which is not on Python's path."""
    folder: Path = tmp_path_factory.mktemp("own")
    (folder / "own_networks.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("sys.path", [path for path in sys.path if path])
        yield "own_networks"


def size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        # 784 * 10 + 10
        ("mclr", (1, 28, 28), 7_850),
        # 64 * 64 + 64 + 64 * 10 + 10
        ("mlp", (1, 8, 8), 4_810),
        # 1*10*25 + 10, 10*20*25 + 20, 320*50 + 50 (20 channels of 4x4), 50*10 + 10
        ("cnn", (1, 28, 28), 21_840),
        # 3*10*25 + 10, 5020, 500*50 + 50 (20 channels of 5x5), 510
        ("cnn", (3, 32, 32), 31_340),
        # 1*10*9 + 10, 10*20*9 + 20, 80*50 + 50 (20 channels of 2x2), 510
        ("cnn", (1, 8, 8), 6_480),
        ("mlp", (60,), 4_554),
        # The numbers that FlexCFL's paper gives. 784 * 128 + 128, 128 * 10 + 10
        ("mlp128", (1, 28, 28), 101_770),
        # 784 * 512 + 512, 512 * 10 + 10
        ("mlp512", (1, 28, 28), 407_050),
        # 1*32*9 + 32, 32*64*9 + 64, 64*7*7*10 + 10
        ("cnn3x3", (1, 28, 28), 50_186),
        # 1*32*9 + 32, 32*32*9 + 32, 32*32*25 + 32; 32*64*9 + 64, 64*64*9 + 64, 64*64*25 + 64;
        # 64*4*4*128 + 128, 128*10 + 10
        ("cnn6", (1, 28, 28), 325_578),
        # 1*32*25 + 32, 32*64*25 + 64, 64*7*7*1024 + 1024, 1024*10 + 10
        ("cnn5x5-wide", (1, 28, 28), 3_274_634),
        # CASA's, as in FedRep's code: 1*64*25 + 64, 64*64*25 + 64, 64*4*4*128 + 128, 128*64 + 64,
        # 64*10 + 10; on colour images 3*64*25 + 64, 102,464, 64*5*5*120 + 120, 120*64 + 64, 650
        ("cnn-fedrep", (1, 28, 28), 244_234),
        ("cnn-fedrep", (3, 32, 32), 307_842),
        # Flower's niid_bench: 1*6*25 + 6, 6*16*25 + 16, 16*4*4*120 + 120, 120*84 + 84, 84*10 + 10
        ("lenet5", (1, 28, 28), 44_426),
        # CFLA's: 1*6*25 + 6, 6*16*25 + 16, 16*5*5*120 + 120, 120*84 + 84, 84*10 + 10
        ("lenet5-tanh", (1, 28, 28), 61_706),
        # PFLlib's: 1*32*25 + 32, 32*64*25 + 64, 64*4*4*512 + 512, 512*10 + 10
        ("cnn5x5-unpadded", (1, 28, 28), 582_026),
        # As in ClusterFL's: 900*300 + 300, 300*10 + 10
        ("mlp300", (900,), 273_310),
        # 3*64*9 + 2*64; stages of four 3x3 convolutions with two numbers per channel after each,
        # the shortcuts' 1x1 convolutions; 512*10 + 10:
        # 1,856 + 147,968 + 525,568 + 2,099,712 + 8,393,728 + 5,130
        ("resnet18", (3, 32, 32), 11_173_962),
    ],
)
def test_networks_have_the_size_they_should(
    name: str, shape: tuple[int, ...], parameters: int
) -> None:
    module = models.build(name, shape, 10)
    assert size(module) == parameters
    assert module(torch.zeros(3, *shape)).shape == (3, 10)


@pytest.mark.parametrize("shape", [(1, 4, 4), (1, 15, 15), (3, 16, 16), (2, 5, 40), (4, 64, 64)])
def test_cnn_takes_images_of_many_sizes(shape: tuple[int, ...]) -> None:
    assert models.build("cnn", shape, 3)(torch.zeros(1, *shape)).shape == (1, 3)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("cnn3x3", [(1, 4, 4), (3, 9, 12)]),
        ("cnn5x5-wide", [(1, 4, 4), (3, 9, 12)]),
        ("cnn6", [(1, 13, 13), (3, 32, 17)]),
        ("cnn-fedrep", [(1, 16, 16), (3, 17, 40)]),
        ("resnet18", [(1, 8, 8), (3, 9, 12)]),
    ],
)
def test_networks_take_images_of_other_sizes(name: str, shapes: list[tuple[int, ...]]) -> None:
    for shape in shapes:
        assert models.build(name, shape, 3)(torch.zeros(2, *shape)).shape == (2, 3)
    channels, height, width = shapes[0]
    with pytest.raises(UserError, match=f"of at least {height}x{width} pixels"):
        models.build(name, (channels, height - 1, width), 3)


def test_units_are_dropped_in_training_only() -> None:
    for name, layers in (("cnn3x3", 1), ("cnn6", 3), ("cnn5x5-wide", 0), ("mlp128", 0)):
        module = models.build(name, (1, 28, 28), 10)
        x = torch.ones(2, 1, 28, 28)
        assert sum(isinstance(layer, torch.nn.Dropout) for layer in module.modules()) == layers
        module.train()
        assert torch.equal(module(x), module(x)) == (layers == 0)
        module.eval()
        assert torch.equal(module(x), module(x))


def test_a_seed_decides_the_weights_and_torchs_own_generator_stays_as_it_was() -> None:
    before = torch.get_rng_state()
    first, again, other = (models.build("mlp", (4,), 2, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    weights = [module.state_dict()["hidden.weight"] for module in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_initial_arrays_are_the_layers_of_the_network_that_the_dataset_asks_for() -> None:
    record = models.initial_arrays(RunConfig(seed=4))
    module = models.build("mlp", (1, 8, 8), 10, seed=4)
    spec = ModelSpec.of(record)
    assert spec.names == ("hidden.weight", "hidden.bias", "output.weight", "output.bias")
    assert set(spec.dtypes) == {"float32"}
    for name, values in module.state_dict().items():
        assert np.array_equal(from_array(record[name]), values.numpy())


def test_initial_arrays_hold_buffers_and_whole_numbers_stay_whole(own: str) -> None:
    record = models.initial_arrays(RunConfig(model=f"{own}:normalised"), DataShape((64,), 2))
    spec = ModelSpec.of(record)
    types = dict(zip(spec.names, spec.dtypes, strict=True))
    assert types["1.running_mean"] == "float32"
    assert types["1.num_batches_tracked"] == "int64"
    assert from_array(record["1.running_var"]).tolist() == [1.0] * 64


def test_a_users_own_network_is_built_by_module_and_function(own: str) -> None:
    module = models.build(f"{own}:good", (1, 8, 8), 10, seed=1)
    assert size(module) == 650
    again = models.build(f"{own}:good", (1, 8, 8), 10, seed=1)
    assert torch.equal(module[1].weight, again[1].weight)


def test_a_users_own_network_is_made_single_precision(own: str) -> None:
    module = models.build(f"{own}:doubles", (64,), 10)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mpl", "Unknown model 'mpl'. Did you mean 'mlp'"),
        (
            "no_such_module:build",
            "Cannot import 'no_such_module'.*cnn1d, .*gru, .*lstm, mclr, mlp.*, or module:func",
        ),
        (":build", "Cannot import ''"),
        ("{own}:none", r"has no function 'none' .*def none\(input_shape, num_classes\)"),
        ("{own}:number", "has no function 'number'"),
        ("{own}:no_network", "must return a torch.nn.Module, got str"),
        ("{own}:no_tensor", r"output for 2 samples is tuple, not \(2, 10\)"),
        ("{own}:wrong_width", r"output for 2 samples is \(2, 11\), not \(2, 10\)"),
        ("{own}:wrong_input", r"does not fit the data, inputs of shape \(1, 8, 8\) and 10 outputs"),
        ("{own}:crash", "out of ideas"),
        ("{own}:misspelt", r"^NameError: name 'nm' is not defined \(\w+\.py, line \d+\)"),
        ("{own}:of_ids", r"scalar types: Long.*token ids need x\.long\(\)"),
        ("{own}:frozen", "has no weights to train: all are frozen"),
        ("{own}:infinite", "'mask' must hold finite real numbers.*persistent=False"),
    ],
)
def test_a_network_that_does_not_fit_the_data_is_reported(
    own: str, name: str, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        models.build(name.replace("{own}", own), (1, 8, 8), 10)
    assert "\n" not in str(caught.value)


OWN_ERRORS = {
    "nm.ReLU()": "NameError: name 'nm'",
    "nn.Linear(64, 10, foo=3)": "TypeError: .*unexpected keyword argument 'foo'",
    "nn.Linear(64, 10).weigth": "AttributeError: .*'weigth'",
    "1 // 0": "ZeroDivisionError: ",
    "{}['width']": "KeyError: 'width'",
    "[][7]": "IndexError: list index out of range",
}


@pytest.mark.parametrize("in_forward", [False, True])
@pytest.mark.parametrize("mistake", OWN_ERRORS)
def test_a_mistake_in_a_users_network_is_no_misfit(
    mistake: str, in_forward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"mistaken_{list(OWN_ERRORS).index(mistake)}_{int(in_forward)}"
    made, used = ("nn.Linear(64, 10)", mistake) if in_forward else (mistake, "x")
    (tmp_path / f"{module}.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n"
        f"        super().__init__()\n        self.one = {made}\n\n"
        f"    def forward(self, x):\n        return self.one({used})\n\n\n"
        "def build(input_shape, num_classes):\n    return Net()\n"
    )
    monkeypatch.chdir(tmp_path)
    line = 10 if in_forward else 7
    where = rf" \({module}\.py, line {line}\)\. Correct it there"
    with pytest.raises(UserError, match=OWN_ERRORS[mistake] + ".*" + where) as caught:
        models.build(f"{module}:build", (64,), 10)
    assert "token" not in str(caught.value)


def test_the_hint_at_tokens_is_for_tokens(own: str) -> None:
    with pytest.raises(UserError, match=r"multiplied \(2x64 and 63x10\)\.$"):
        models.build(f"{own}:wrong_input", (1, 8, 8), 10)


def test_buffers_may_be_masks_and_may_be_assigned_in_training(own: str) -> None:
    network = models.Network(models.build(f"{own}:masked", (64,), 10))
    record = models.initial_arrays(RunConfig(model=f"{own}:masked"), DataShape((64,), 10))
    spec = ModelSpec.of(record)
    for level in (1.0, 3.0):
        # Simulates another client that has used the network in this process before.
        network.read(record)
        network.module.train()
        network.module(torch.full((2, 64), level))
        trained = network.write(spec)
        assert from_array(trained["mean"]).tolist() == [0.5 * level] * 64
        assert from_array(trained["mask"]).tolist() == [False] * 10 + [True] * 54
    assert spec.pack(spec.unpack(trained)) == trained


@pytest.mark.parametrize("shape", [(60,), (8, 8), (1, 3, 3)])
def test_cnn_says_that_it_takes_images(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"'cnn' does not fit the data.*images.*mlp and mclr"):
        models.build("cnn", shape, 10)


def test_every_network_introduces_itself_in_one_line() -> None:
    for line in MODELS.summaries().values():
        assert 20 < len(line) < 100
        assert line.endswith((".", ")"))


@pytest.mark.parametrize("shape", [(9, 128), (128, 9), (2048,), (32, 32), (3, 40), (1, 7), (4,)])
def test_cnn1d_takes_windows_waves_and_spectra_of_any_length(shape: tuple[int, ...]) -> None:
    assert models.build("cnn1d", shape, 6)(torch.randn(2, *shape)).shape == (2, 6)


def test_the_longer_axis_of_a_window_is_time() -> None:
    channels_first = models.build("cnn1d", (9, 128), 6, seed=3)
    time_first = models.build("cnn1d", (128, 9), 6, seed=3)
    x = torch.randn(4, 9, 128)
    torch.testing.assert_close(channels_first(x), time_first(x.transpose(1, 2)))
    # 9*32*9 + 32, 2*32, 32*64*9 + 64, 2*64, 64*8*64 + 64, 64*6 + 6
    assert size(channels_first) == 54_534


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # 7*16 (embedding), 3 gates of 16*128 + 128*128 + 2*128, 128*3 + 3
        ("gru", 112 + 3 * 18_688 + 387),
        # The same with 4 gates.
        ("lstm", 112 + 4 * 18_688 + 387),
    ],
)
def test_recurrent_networks_need_a_vocabulary_and_read_ids_that_came_as_floats(
    name: str, parameters: int
) -> None:
    module = models.build(name, (5,), 3, tokens=7)
    assert size(module) == parameters
    x = torch.tensor([[0.0, 1.0, 6.0, 2.0, 0.0]])
    assert module(x).shape == (1, 3)
    # The output depends on the last token and on the first.
    for position in (0, 4):
        other = x.clone()
        other[0, position] = 3.0
        assert not torch.allclose(module(x), module(other))
    with pytest.raises(UserError, match="it takes token ids"):
        models.build(name, (5,), 3)


@pytest.mark.parametrize("name", ["cnn1d", "gru", "lstm"])
def test_models_of_sequences_do_not_take_images(name: str) -> None:
    with pytest.raises(UserError, match=f"'{name}' does not fit the data.*it takes"):
        models.build(name, (1, 8, 8), 10)
