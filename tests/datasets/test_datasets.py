from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.registry import DATASETS, PARTITIONERS
from raceme.datasets.images import MNIST_FILES
from raceme.datasets.source import DataShape, client_samples

Arrays = dict[str, np.ndarray]


def write_idx(path: Path, values: np.ndarray) -> None:
    """Write an idx file of bytes: magic 0x08 and number of dimensions, sizes, data."""
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    path.write_bytes(header + values.astype(np.uint8).tobytes())


def write_mnist(root: Path, folder: str = "MNIST", train: int = 300, test: int = 100) -> None:
    rng = np.random.default_rng(0)
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", train), ("t10k", test)):
        write_idx(raw / f"{name}-images-idx3-ubyte", rng.integers(0, 256, (count, 28, 28)))
        write_idx(raw / f"{name}-labels-idx1-ubyte", np.arange(count) % 10)


def device_arrays(samples: int = 6, classes: int = 3) -> Arrays:
    rng = np.random.default_rng(samples)
    return {
        "x_train": rng.normal(size=(samples, 4)).astype(np.float32),
        "y_train": np.arange(samples) % classes,
        "x_test": rng.normal(size=(2, 4)).astype(np.float32),
        "y_test": np.array([0, 1]),
    }


def npz_config(path: Path, **keys: object) -> RunConfig:
    values = {"dataset": "npz", "data_file": str(path), "clients": 1, **keys}
    return RunConfig().with_values(**values)


# --- digits -------------------------------------------------------------------------------------


def test_digits_are_complete_and_normalised() -> None:
    dataset = datasets.load(RunConfig())
    everything = dataset.inputs(np.arange(len(dataset.y)))
    assert everything.shape == (1797, 1, 8, 8)
    assert everything.dtype == np.float32
    assert abs(everything.mean()) < 1e-3
    assert everything.std() == pytest.approx(1.0, abs=1e-3)
    assert np.bincount(dataset.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_clients_of_the_default_run_share_all_digits_and_none_twice() -> None:
    config = RunConfig()
    clients = datasets.all_clients(config)
    assert sum(len(c.y_train) + len(c.y_test) for c in clients) == 1797
    assert [c.group for c in clients] == [0] * 8 + [1] * 8 + [2] * 12 + [3] * 12
    assert datasets.true_groups(config) == tuple(c.group for c in clients)
    for client in clients:
        total = len(client.y_train) + len(client.y_test)
        assert len(client.y_test) == round(0.2 * total)
        assert len(client.x_train) == len(client.y_train)


def test_training_and_test_samples_are_different_ones() -> None:
    data = datasets.client_data(RunConfig(), 5)
    train = {x.tobytes() for x in data.x_train}
    assert not any(x.tobytes() in train for x in data.x_test)


@pytest.mark.parametrize(("fraction", "tests"), [(0.001, 1), (0.5, 2), (0.999, 4)])
def test_a_client_has_at_least_one_sample_to_train_and_one_to_test(
    fraction: float, tests: int
) -> None:
    # Of 1,797 samples all clients get five; at most three get a sixth.
    config = RunConfig(clients=359, partition="iid", test_fraction=fraction)
    data = datasets.client_data(config, 358)
    assert (len(data.y_train), len(data.y_test)) == (5 - tests, tests)


def test_one_client_is_the_same_as_that_one_of_all_and_depends_on_the_seed() -> None:
    config = RunConfig(partition="dirichlet")
    alone, together = datasets.client_data(config, 7), datasets.all_clients(config)[7]
    other = datasets.client_data(config.with_values(seed=1), 7)
    assert np.array_equal(alone.x_train, together.x_train)
    assert np.array_equal(alone.y_test, together.y_test)
    assert alone.x_train.shape != other.x_train.shape or np.any(alone.x_train != other.x_train)


def test_keys_that_do_not_concern_the_data_do_not_load_it_again() -> None:
    config = RunConfig()
    assert datasets.load(config) is datasets.load(config.with_values(lr=0.5, max_updates=3))


def test_a_client_that_does_not_exist_is_reported() -> None:
    with pytest.raises(UserError, match="no client 40: clients are numbered 0 to 39"):
        datasets.client_data(RunConfig(), 40)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dataset": "digts"}, "Unknown dataset 'digts'. Did you mean 'digits'"),
        ({"partition": "idd"}, "Unknown partition 'idd'. Did you mean 'iid'"),
        ({"clients": 1000}, "Too many clients: 1000"),
    ],
)
def test_unknown_or_unsuitable_data_are_reported(keys: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        datasets.true_groups(RunConfig(**keys))  # type: ignore[arg-type]


def test_every_dataset_and_partitioner_introduces_itself_in_one_line() -> None:
    for registry in (DATASETS, PARTITIONERS):
        for line in registry.summaries().values():
            assert 20 < len(line) < 100
            assert line.endswith((".", ")"))


def test_defaults_fill_in_only_missing_options() -> None:
    filled = datasets.with_defaults(RunConfig(dataset="mnist"))
    assert (filled.model, filled.lr) == ("cnn", 0.01)
    kept = datasets.with_defaults(RunConfig(dataset="mnist", model="mclr", lr=0.5))
    assert (kept.model, kept.lr) == ("mclr", 0.5)


# --- MNIST --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")]
)
def test_mnist_is_read_from_idx_files_pooled_and_normalised(
    tmp_path: Path, name: str, folder: str
) -> None:
    write_mnist(tmp_path, folder)
    config = RunConfig(dataset=name, data_root=str(tmp_path), clients=40)
    dataset = datasets.load(config)
    assert dataset.x.shape == (400, 1, 28, 28)
    assert datasets.data_shape(config) == dataset.shape
    source = DATASETS[name]
    first = dataset.inputs(np.array([0]))
    assert first == pytest.approx((dataset.x[:1] / 255 - source.mean) / source.std, abs=1e-6)
    clients = datasets.all_clients(config)
    assert sum(len(c.y_train) + len(c.y_test) for c in clients) == 400


def test_the_shape_of_mnist_is_known_without_its_files() -> None:
    shape = datasets.data_shape(RunConfig(dataset="mnist"))
    assert (shape.input_shape, shape.num_classes) == ((1, 28, 28), 10)


def test_missing_mnist_files_are_named_with_the_command_that_fetches_them(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "MNIST/raw" / MNIST_FILES[3]).unlink()
    with pytest.raises(UserError) as caught:
        datasets.load(RunConfig(dataset="mnist", data_root=str(tmp_path)))
    message = str(caught.value)
    assert str(tmp_path / "MNIST" / "raw") in message
    assert all(name in message for name in MNIST_FILES)
    assert f"missing: {MNIST_FILES[3]})" in message
    assert f"raceme run --dataset mnist --data-root {tmp_path} --download" in message
    assert "\n" not in message


def test_mnist_without_a_data_root_says_to_give_one() -> None:
    with pytest.raises(UserError, match=r"--data-root DIR.*--dataset fashion-mnist.*--download"):
        datasets.load(RunConfig(dataset="fashion-mnist"))


def test_a_damaged_mnist_file_is_reported(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    damaged = tmp_path / "MNIST/raw" / MNIST_FILES[0]
    damaged.write_bytes(damaged.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"Could not read mnist in .*uncompressed"):
        datasets.load(RunConfig(dataset="mnist", data_root=str(tmp_path)))


def test_a_compressed_mnist_file_under_the_plain_name_is_reported(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    packed = tmp_path / "MNIST/raw" / MNIST_FILES[1]
    packed.write_bytes(gzip.compress(packed.read_bytes()))
    with pytest.raises(UserError, match="Could not read mnist"):
        datasets.load(RunConfig(dataset="mnist", data_root=str(tmp_path)))


def test_images_and_labels_that_do_not_match_are_reported(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    write_idx(tmp_path / "MNIST/raw" / MNIST_FILES[1], np.arange(299) % 10)
    with pytest.raises(UserError, match="Could not read mnist"):
        datasets.load(RunConfig(dataset="mnist", data_root=str(tmp_path)))


def test_a_failing_download_is_reported(tmp_path: Path) -> None:
    not_a_folder = tmp_path / "file"
    not_a_folder.write_text("")
    with pytest.raises(UserError, match=r"Could not download or read mnist in .*To fetch:"):
        datasets.load(RunConfig(dataset="mnist", data_root=str(not_a_folder), download=True))


# --- synthetic ----------------------------------------------------------------------------------


def test_synthetic_clients_are_natural_and_stay_when_others_join() -> None:
    few = RunConfig(dataset="synthetic", clients=3)
    more = few.with_values(clients=5)
    assert datasets.true_groups(more) == (None,) * 5
    for client in range(3):
        a, b = datasets.client_data(few, client), datasets.client_data(more, client)
        assert np.array_equal(a.x_train, b.x_train)
        assert np.array_equal(a.y_test, b.y_test)
    assert datasets.data_shape(few) == datasets.load(few).shape


def test_synthetic_inputs_have_the_papers_variance() -> None:
    # The variance of feature j around the client's centre is j^(-1.2): 1, 0.435, ... 0.0074.
    rng = np.random.default_rng(0)
    spreads = [client_samples(0.0, 0.0, rng)[0].var(axis=0, ddof=1) for _ in range(60)]
    expected = np.arange(1, 61) ** -1.2
    assert np.mean(spreads, axis=0) == pytest.approx(expected, rel=0.15)


def test_synthetic_labels_are_those_of_a_linear_model() -> None:
    x, y = client_samples(1.0, 1.0, np.random.default_rng(5))
    assert x.shape == (len(y), 60)
    assert x.dtype == np.float32
    assert 50 <= len(y) <= 1000
    assert set(y) <= set(range(10))


def test_the_most_samples_of_a_synthetic_client_can_be_set() -> None:
    def sizes(**keys: int) -> list[int]:
        config = RunConfig.from_mapping({"dataset": "synthetic", "clients": 40, **keys})
        return [len(own) for own in datasets.load(config).users or ()]

    usual, few, many = (
        sizes(),
        sizes(**{"synthetic-most": 60}),
        sizes(**{"synthetic-most": 20_000}),
    )
    assert max(usual) == 1000
    assert few == [min(60, size) for size in many]
    assert usual == [min(1000, size) for size in many]
    assert max(many) > 1000


def test_beta_moves_the_inputs_of_clients_apart() -> None:
    def distance(beta: float) -> float:
        rng = np.random.default_rng(0)
        return float(np.std([client_samples(1.0, beta, rng)[0].mean() for _ in range(30)]))

    assert distance(5.0) > 5 * distance(0.0)


# --- npz ----------------------------------------------------------------------------------------


def test_a_devices_file_is_read_as_it_is(tmp_path: Path) -> None:
    arrays = device_arrays()
    np.savez(tmp_path / "own.npz", **arrays)
    config = npz_config(tmp_path / "own.npz")
    data = datasets.client_data(config, 0)
    for name, values in arrays.items():
        assert np.array_equal(getattr(data, name), values)
    assert (data.x_train.dtype, data.y_train.dtype, data.group) == (np.float32, np.int64, None)
    assert datasets.data_shape(config) == DataShape((4,), 3)


def test_a_device_with_one_file_may_be_any_of_several_clients(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", **device_arrays())
    config = npz_config(tmp_path / "own.npz", clients=5)
    assert len(datasets.client_data(config, 4).y_train) == 6
    with pytest.raises(UserError, match=r"one file for 5 clients: write \{client\}"):
        datasets.all_clients(config)


def test_a_simulation_reads_one_file_per_client_and_takes_the_largest_number_of_classes(
    tmp_path: Path,
) -> None:
    for client, classes in enumerate((2, 5, 3)):
        np.savez(tmp_path / f"device-{client}.npz", **device_arrays(6 + client, classes))
    config = npz_config(tmp_path / "device-{client}.npz", clients=3)
    assert [len(c.y_train) for c in datasets.all_clients(config)] == [6, 7, 8]
    assert datasets.data_shape(config) == DataShape((4,), 5)
    assert datasets.true_groups(config) == (None, None, None)


def test_a_device_needs_only_its_own_of_the_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "device-2.npz", **device_arrays(), num_classes=np.array(7))
    config = npz_config(tmp_path / "device-{client}.npz", clients=3)
    assert len(datasets.client_data(config, 2).y_train) == 6
    assert datasets.data_shape(config).num_classes == 7


def without(name: str) -> Arrays:
    return {key: values for key, values in device_arrays().items() if key != name}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (without("y_test"), "lacks y_test"),
        ({"x_train": np.zeros((6, 5))}, "samples of one shape"),
        ({"x_train": np.zeros(6)}, r"x_train must hold numbers, shape \(samples, ...\)"),
        ({"x_test": np.zeros((0, 4))}, "x_test must hold numbers.*at least one sample"),
        ({"x_train": np.full((6, 4), np.nan)}, "x_train must be finite"),
        ({"x_train": np.full((6, 4), 1e300)}, "x_train must be finite"),
        ({"x_train": np.full((6, 4), "a")}, "x_train must hold numbers.*got <U1"),
        (
            {"x_train": np.full((6, 4), None)},
            "neither numbers nor text but object",
        ),
        ({"y_train": np.zeros(6)}, r"y_train must hold whole numbers, shape \(6,\).*float64"),
        ({"y_train": np.zeros(5, int)}, r"shape \(6,\), one for each sample"),
        ({"y_test": np.array([0, -1])}, "y_test must hold labels from 0, below 100,000; got -1"),
        ({"num_classes": np.array(2)}, "num_classes must be one whole number, at least 3"),
        ({"num_classes": np.array([3, 4])}, "num_classes must be one whole number"),
    ],
)
def test_a_file_that_does_not_hold_the_right_arrays_is_reported(
    tmp_path: Path, changed: Arrays, message: str
) -> None:
    arrays = changed if "y_train" in changed and len(changed) > 1 else device_arrays() | changed
    path = tmp_path / "bad.npz"
    np.savez(path, allow_pickle=True, **arrays)
    with pytest.raises(UserError, match=message) as caught:
        datasets.client_data(npz_config(path), 0)
    assert str(path) in str(caught.value)


def test_files_that_are_missing_or_no_archives_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There is no data file .*Expected: x_train"):
        datasets.client_data(npz_config(tmp_path / "none.npz"), 0)
    for content in (b"", b"text", b"PK\x03\x04 not really"):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(UserError, match=r"Cannot read .*bad\.npz as \.npz"):
            datasets.client_data(npz_config(tmp_path / "bad.npz"), 0)
    np.save(tmp_path / "single.npy", np.zeros(3))
    with pytest.raises(UserError, match="single array"):
        datasets.client_data(npz_config(tmp_path / "single.npy"), 0)
    with pytest.raises(UserError, match="npz needs the file"):
        datasets.client_data(RunConfig(dataset="npz"), 0)


def test_files_of_different_shapes_do_not_make_one_dataset(tmp_path: Path) -> None:
    for client, width in enumerate((4, 5)):
        arrays = device_arrays()
        arrays |= {name: np.zeros((len(arrays[name]), width)) for name in ("x_train", "x_test")}
        np.savez(tmp_path / f"{client}.npz", **arrays)
    with pytest.raises(
        UserError, match=r"1\.npz: samples must have the shape of those in .*0\.npz"
    ):
        datasets.true_groups(npz_config(tmp_path / "{client}.npz", clients=2))


# --- defaults of the dataset ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "clients"),
    [("digits", 40), ("mnist", 100), ("fashion-mnist", 100), ("cifar10", 100), ("synthetic", 30)],
)
def test_a_dataset_says_how_many_clients_suit_it(dataset: str, clients: int) -> None:
    assert datasets.with_clients(RunConfig(dataset=dataset)).clients == clients
    assert datasets.with_clients(RunConfig(dataset=dataset, clients=7)).clients == 7


def test_as_many_clients_as_there_are_numbered_files(tmp_path: Path) -> None:
    for client in (0, 1, 2, 4):
        np.savez(tmp_path / f"device-{client}.npz", **device_arrays())
    several = npz_config(tmp_path / "device-{client}.npz", clients=None)
    assert datasets.with_clients(several).clients == 3
    assert datasets.with_clients(npz_config(tmp_path / "device-0.npz", clients=None)).clients == 1


def test_groups_shrink_to_the_clients_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    groups = datasets.true_groups(RunConfig(clients=2))
    assert groups == (0, 1)
    assert caplog.messages == [
        "groups '0.2,0.2,0.3,0.3' do not fit (clients=2, 10 labels): merged into '0.4,0.6'"
    ]
    labels = [set(data.y_train) for data in datasets.all_clients(RunConfig(clients=2))]
    assert labels == [{0, 1, 2, 3}, {4, 5, 6, 7, 8, 9}]
    assert len(caplog.messages) == 1


def test_groups_that_fit_stay_and_those_of_people_do_not_matter(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fitting = RunConfig(clients=4)
    assert datasets.with_fitting_groups(fitting) is fitting
    people = RunConfig(dataset="synthetic", clients=2)
    assert datasets.with_fitting_groups(people) is people
    assert not caplog.messages
    skewed = datasets.with_fitting_groups(RunConfig(clients=3, partition="rotation-groups"))
    # Three groups rotate their images by multiples of 120 degrees, not of 90.
    assert datasets.true_groups(skewed) == (0, 1, 2)
