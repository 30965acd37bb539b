"""Arrays, tensors and torch Datasets that a script or a notebook passes as ``data=``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch.utils.data import TensorDataset

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.datasets.given import ColumnRoles, keep
from raceme.datasets.source import Dataset
from raceme.reporting.artefacts import export_model

X = np.arange(24, dtype=np.float64).reshape(6, 4)
Y = np.array([0, 1, 2, 0, 1, 2])
PAIR = (X, Y)
FOUR = (X[:4], Y[:4], X[4:], Y[4:])


def given(data: Any, columns: ColumnRoles | None = None, **values: Any) -> RunConfig:
    keys = {"dataset": "arrays", "data-fingerprint": keep(data, columns), **values}
    return datasets.with_defaults(RunConfig.from_mapping(keys))


@pytest.mark.parametrize(
    "data",
    [
        [FOUR, FOUR],
        {"anna": FOUR, "ben": FOUR},
        (tuple(map(torch.tensor, FOUR)) for _ in range(2)),
        [[part.tolist() for part in FOUR]] * 2,
        [(TensorDataset(*map(torch.tensor, FOUR[:2])), TensorDataset(*map(torch.tensor, FOUR[2:])))]
        * 2,
        [{"x": X, "y": Y, "heldout": np.arange(6) > 3}] * 2,
    ],
)
def test_every_form_gives_the_same_samples_which_are_not_scaled(data: Any) -> None:
    config = given(data)
    clients = datasets.all_clients(config)
    assert len(clients) == 2
    for client in clients:
        assert client.x_train.dtype == np.float32
        np.testing.assert_array_equal(client.x_train, X[:4])
        np.testing.assert_array_equal(client.y_test, Y[4:])
    assert datasets.data_shape(config).num_classes == 3


def test_a_dataset_of_pairs_is_split_and_groups_and_quantities_are_taken() -> None:
    config = given([TensorDataset(torch.tensor(X), torch.tensor(Y))])
    (client,) = datasets.all_clients(config)
    assert sorted([*client.y_train, *client.y_test]) == sorted(Y)
    rooms = [{"x": X, "y": X[:, 0], "unit": "°C", "group": room} for room in (0, 1)]
    config = given(rooms)
    assert datasets.true_groups(config) == (0, 1)
    target = datasets.data_shape(config).target
    assert target is not None
    assert target.unit == "°C"


def test_labels_may_be_true_and_false() -> None:
    (client,) = datasets.all_clients(given([(X, Y > 0)]))
    assert client.y_train.dtype == np.int64
    assert sorted([*client.y_train, *client.y_test]) == [0, 0, 1, 1, 1, 1]


def test_labels_without_samples_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    datasets.load(given([(X, Y + 1)]))
    assert (
        "no sample has label 0, and the model has an output for each label up to 3" in caplog.text
    )
    caplog.clear()
    datasets.load(given([{"x": X, "y": Y + 1, "num_classes": 4}]))
    datasets.load(given([(X, Y)]))
    assert "no sample" not in caplog.text


def test_the_fingerprint_is_of_the_content() -> None:
    assert keep([PAIR]) == keep([(torch.tensor(X), Y)])
    assert len({keep([PAIR]), keep([PAIR, PAIR]), keep([(X + 1, Y)]), keep([(X, Y[::-1])])}) == 4


def test_clients_of_a_mapping_keep_their_names() -> None:
    config = given({"anna": PAIR, "ben": PAIR, 7: PAIR}, clients=2)
    assert datasets.client_names(config) == ("anna", "ben")
    assert datasets.client_name(config, 1) == "ben"
    assert datasets.client_names(given([PAIR, PAIR])) == ()
    assert datasets.client_name(given([PAIR, PAIR]), 1) == "client-1"


def cloud(config: RunConfig) -> Dataset:
    """A dataset drawn from numpy's global generator, without a seed."""
    y = np.arange(20) % 2
    return Dataset(np.random.rand(20, 3).astype(np.float32), y, num_classes=2)


def test_what_a_dataset_draws_without_a_seed_is_that_of_the_run() -> None:
    found = []
    for seed in (0, 1, 0):
        config = RunConfig(dataset=f"{__name__}:cloud", partition="iid", clients=2, seed=seed)
        datasets.forget()
        np.random.rand()
        found.append(datasets.client_data(config, 0).x_train)
    np.testing.assert_array_equal(found[0], found[2])
    assert not np.array_equal(found[0], found[1])


def test_data_missing_from_the_cache_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint = keep([PAIR])
    monkeypatch.setenv("RACEME_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="lacks it: run that script again"):
        datasets.with_clients(
            RunConfig.from_mapping({"dataset": "arrays", "data-fingerprint": fingerprint})
        )


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Items are mappings, like those of Hugging Face and flwr-datasets."""

    def __init__(self, **columns: Any) -> None:
        self.columns_ = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns_.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: values[index] for name, values in self.columns_.items()}


PEOPLE = {
    "person": ["ben"] * 6 + ["anna"] * 6,
    "x": [*range(12)],
    "y": [value / 4 for value in range(12)],
    "activity": ["run", "sit", "walk"] * 4,
}


def check_people(config: RunConfig) -> None:
    """Check two named clients with two features, whose labels are numbered alphabetically."""
    assert datasets.client_names(config) == ("ben", "anna")
    assert datasets.load(config).labels == ("run", "sit", "walk")
    anna = datasets.client_data(config, 1)
    assert (len(anna.x_train), len(anna.x_test)) == (5, 1)
    assert anna.x_train.shape[1:] == (2,)
    rows = datasets.load(config).x[:3].tolist()
    assert rows == [[0.0, 0.0], [1.0, 0.25], [2.0, 0.5]]
    assert datasets.load(config).y[:4].tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("kind", [pandas.DataFrame, lambda columns: Rows(**columns)])
def test_one_table_may_hold_all_clients(kind: Any) -> None:
    columns = ColumnRoles(target="activity", client_id="person")
    check_people(given(kind(PEOPLE), columns))
    chosen = given(kind(PEOPLE), ColumnRoles("activity", "person", inputs="x"))
    shape = datasets.data_shape(chosen)
    assert (shape.input_shape, shape.tokens) == ((1,), 0)
    quantity = given(kind(PEOPLE), ColumnRoles("y", "person", inputs="x", unit="m"))
    target = datasets.data_shape(quantity).target
    assert target is not None
    assert (target.unit, target.mean) == ("m", 1.375)


def test_a_csv_file_is_read_as_a_table(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    pandas.DataFrame(PEOPLE).to_csv(path, index=False)
    keys = {"dataset": str(path), "target": "activity", "client-id": "person"}
    config = datasets.with_defaults(RunConfig.from_mapping(keys))
    check_people(config)
    assert (config.dataset, config.num_clients, config.model) == ("table", 2, "mlp")
    # Inputs are standardised: each feature has mean 0 and deviation 1.
    train = np.concatenate([client.x_train for client in datasets.all_clients(config)])
    np.testing.assert_allclose(train.mean(axis=0), 0, atol=1e-6)
    with pytest.raises(UserError, match=r"Unknown column of .*people\.csv 'activty'\. Did you"):
        datasets.load(config.with_values(target="activty"))
    path.write_text("a,y\n1,2\n3\n")
    datasets.forget()
    with pytest.raises(UserError, match=r"people\.csv, row 3: 1 cell for the 2 columns"):
        datasets.load(config)
    with pytest.raises(UserError, match=r"Cannot read .*none\.csv: No such file"):
        datasets.load(config.with_values(data_file=str(tmp_path / "none.csv")))


@pytest.mark.parametrize("kind", [pandas.DataFrame, lambda columns: Rows(**columns)])
def test_each_client_may_have_one_table_or_two(kind: Any) -> None:
    train, test = (
        kind({"image": [*X[:4]], "label": Y[:4]}),
        kind({"image": [*X[4:]], "label": [1, 2]}),
    )
    if kind is pandas.DataFrame:
        train = pandas.DataFrame(X[:4]).assign(label=Y[:4])
        test = pandas.DataFrame(X[4:]).assign(label=[1, 2])
    for data in ([(train, test)], [{"train": train, "test": test}]):
        (client,) = datasets.all_clients(given(data))
        np.testing.assert_array_equal(client.x_train, X[:4])
        np.testing.assert_array_equal(client.y_test, Y[4:])
    (client,) = datasets.all_clients(given([train]))
    assert client.x_train.shape == (3, 4)


def test_partitions_of_hugging_face_keep_the_names_of_their_classes() -> None:
    # The test folder `datasets` has the same name as the library.
    pytest.importorskip("datasets.arrow_dataset")
    hugging = sys.modules["datasets"]
    pixels = np.arange(4 * 8 * 6 * 3, dtype=np.uint8).reshape(4, 8, 6, 3)
    names = hugging.ClassLabel(names=["cat", "dog", "owl"])
    features = hugging.Features({"img": hugging.Image(), "label": names})
    partition = hugging.Dataset.from_dict({"img": list(pixels), "label": [0, 1, 0, 1]}, features)
    config = given([partition, partition])
    assert datasets.load(config).labels == ("cat", "dog", "owl")
    assert datasets.data_shape(config).num_classes == 3
    np.testing.assert_array_equal(datasets.load(config).x[0], pixels[0].transpose(2, 0, 1))
    tested = partition.train_test_split(test_size=0.5, seed=0)
    assert len(datasets.client_data(given([tested]), 0).x_test) == 2


RUN_AND_END = """
import numpy as np
import raceme

pixels = np.arange(60, dtype=np.uint8).reshape(5, 3, 4)
data = [(pixels, list("babab")), (pixels, list("ababa"))]
raceme.run("fedasync", data=data, max_updates=2, workers=0, client_map=False, out="run")
"""


@pytest.mark.slow
def test_a_copy_is_removed_at_the_end_and_the_model_can_still_be_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("RACEME_CACHE", str(cache))
    # A folder that a killed process has left behind.
    (cache / "arrays-0123456789abcdef").mkdir(parents=True)
    subprocess.run([sys.executable, "-c", RUN_AND_END], cwd=tmp_path, check=True)
    assert [entry.name[:5] for entry in cache.iterdir()] == ["form-"]
    folder, _ = export_model(tmp_path / "run", "safetensors")
    about = json.loads((folder / "model.json").read_text())
    assert about["labels"] == ["a", "b"]
    # Bytes are divided by 255, as in the run.
    assert about["input"]["type"] == "uint8"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "data holds no clients"),
        ({7: PAIR, "7": PAIR}, "data has two clients of the name '7'"),
        (3, "data must be a list or a mapping .* got an object of type int"),
        (PAIR, r"data\[0\] must be .* got an object of type ndarray"),
        ([PAIR, (X, Y, X)], r"data\[1\] must be .* got an object of type tuple"),
        ([PAIR, (X[:, :3], Y)], r"different shapes: \(3,\), \(4,\) \(in data\[1\], data\[0\]\)"),
        ([PAIR, (X[:5], Y)], r"data\[1\]: y must hold whole numbers, shape \(5,\)"),
        ({"anna": (X[:0], Y[:0])}, r"data\['anna'\]: x must hold .* at least one sample"),
        ([(np.where(X > 9, np.nan, X), Y)], r"data\[0\]: x must be finite"),
        ([PAIR, (X, Y / 2)], r"data\[1\]: y must hold whole numbers.*needs its unit"),
        ([PAIR, {"x": X, "y": Y / 2, "unit": "m"}], r"must describe their labels alike"),
        ([(X, Y - 1)], "labels from 0,"),
        ([(X, list("abcabc")), PAIR], r"Some clients in data have names .*: data\[1\]"),
        ([Rows(age=[1.0, 2.0], job=["a", "b"], y=[0, 1])], r"column job holds no numbers \('a'\)"),
        ([Rows(a=[1.0, 2.0], b=[0, 1])], r"has the columns a, b: name the one with the labels"),
        ([Rows(a=[X, X], b=[1, 2], y=[0, 1])], "has the columns a, b, y: name .* inputs=NAME"),
        (Rows(a=[1.0, 2.0], y=[0, 1]), "name the one with the clients' names, client-id=NAME"),
        ([PAIR, FOUR], "Some clients in data have test samples"),
        ([{"x": X, "labels": Y}], r"data\[0\] has labels\. Expected"),
        ([{"x": X}], r"data\[0\] lacks y\. Expected"),
        ([([[1.0, 2.0], [3.0]], [0, 1])], r"data\[0\]: x is no array"),
        ([torch.utils.data.Subset(TensorDataset(torch.tensor(X)), [0, 1])], "Dataset of pairs"),
        ([TensorDataset(torch.zeros(0, 4), torch.zeros(0))], r"data\[0\]: x must hold numbers"),
    ],
)
def test_bad_data_are_one_line(data: Any, said: str) -> None:
    with pytest.raises(UserError, match=said) as raised:
        keep(data)
    assert "\n" not in str(raised.value)


def test_more_clients_than_were_given_are_refused() -> None:
    with pytest.raises(UserError, match="Too many clients: 3, but data holds 2"):
        datasets.all_clients(given([PAIR, PAIR], clients=3))
    assert len(datasets.all_clients(given([PAIR, PAIR], clients=1))) == 1
