"""Datasets by user, on small generated files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.datasets.leaf import CharacterOptions, Writers, by_writer, kinds
from raceme.datasets.source import DataShape


def write(path: Path, users: dict[str, tuple[list[Any], list[Any]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {name: {"x": x, "y": y} for name, (x, y) in users.items()}
    path.write_text(json.dumps({"users": list(data), "user_data": data}))


def config_of(root: Path, **keys: Any) -> RunConfig:
    return RunConfig(dataset="leaf", data_root=str(root), **keys)


def test_leafs_synthetic_data_are_read_by_user(tmp_path: Path) -> None:
    write(
        tmp_path / "data/train/a.json",
        {"u0": ([[1.0, 5.0]], [0.0]), "u1": ([[2.0, 5.0], [6.0, 5.0]], [1.0, 3.0])},
    )
    write(tmp_path / "data/test/a.json", {"u0": ([[9.0, 5.0]], [2.0]), "u1": ([[3.0, 5.0]], [1.0])})
    config = datasets.with_defaults(config_of(tmp_path))
    assert (config.clients, config.model) == (2, "mlp")
    assert datasets.data_shape(config) == DataShape((2,), 4)
    # The user with most samples is first. Of 1, 2 and 6 the mean is 3, the variance 14 / 3.
    data = datasets.client_data(config, 0)
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([1, 3], [1])
    expected = (np.array([[2.0], [6.0]]) - 3.0) / np.sqrt(14 / 3)
    np.testing.assert_allclose(data.x_train[:, :1], expected, rtol=1e-6)
    assert not data.x_train[:, 1].any()


def test_leafs_shakespeare_is_read_by_role(tmp_path: Path) -> None:
    write(
        tmp_path / "all_data/a.json",
        {"ROMEO": (["abba", "bcab"], ["c", "a"]), "X": (["aaaa"], ["d"])},
    )
    config = datasets.with_defaults(config_of(tmp_path))
    # X has one sample only, so it is no client.
    assert (config.clients, config.model) == (1, "gru")
    assert datasets.data_shape(config) == DataShape((4,), 4, tokens=4)
    data = datasets.client_data(config, 0)
    found = {tuple(x): int(y) for x, y in zip(data.x_train, data.y_train, strict=True)}
    found |= {tuple(x): int(y) for x, y in zip(data.x_test, data.y_test, strict=True)}
    assert found == {(0, 1, 1, 0): 2, (1, 2, 0, 1): 0}


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ([[1.0], [2.0]], [0]),
        ([[1.0], [2.0]], [0, -1]),
        ([[1.0], [2.0]], [0, 0.5]),
        ([[1.0], [2.0, 3.0]], [0, 1]),
        ([[1.0], [float("nan")]], [0, 1]),
        (["ab", "abc"], ["a", "b"]),
        (["ab", "cd"], ["a", "bc"]),
        ([["id", "date"], ["a", "b"]], [0, 1]),
        ([1.0, 2.0], [0, 1]),
        (["ab", 3], ["a", "b"]),
    ],
)
def test_mistakes_in_a_users_data_are_reported(tmp_path: Path, x: list[Any], y: list[Any]) -> None:
    write(tmp_path / "train/a.json", {"u": (x, y)})
    with pytest.raises(UserError, match=r"a\.json, user 'u': expected of every user x") as caught:
        datasets.load(config_of(tmp_path, clients=1))
    assert "\n" not in str(caught.value)


def test_mistakes_in_leaf_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="leaf needs the folder with LEAF's files"):
        datasets.load(RunConfig(dataset="leaf", clients=1))
    with pytest.raises(UserError, match=r"leaf is not under .*expected train/\*\.json"):
        datasets.load(config_of(tmp_path, clients=1))
    path = tmp_path / "train/a.json"
    write(path, {"u": ([[1.0], [2.0]], [0, 1]), "v": ([[1.0, 2.0]], [0])})
    with pytest.raises(UserError, match="samples of different shapes"):
        datasets.load(config_of(tmp_path, clients=1))
    write(path, {"u": ([[1.0], [2.0]], [0, 1]), "v": (["a"], ["b"])})
    with pytest.raises(UserError, match="different shapes, or numbers and text"):
        datasets.load(config_of(tmp_path, clients=1))
    write(path, {"u": ([], [])})
    with pytest.raises(UserError, match="hold no samples"):
        datasets.load(config_of(tmp_path, clients=1))
    write(path, {"u": ([[1.0], [2.0]], [0, 1])})
    with pytest.raises(UserError, match=r"Too many clients: 2, but .* only 1 users"):
        datasets.load(config_of(tmp_path, clients=2))


# Characters by writer: selected classes, selected writers, and folders in the place of FEMNIST.


REAL = Path(os.environ.get("RACEME_TEST_DATA", "../shared/data"))
# Labels: 10 is A, 36 is a, 37 is b, 38 is c.
A, B, C = 36, 37, 38


def writers_of(root: Path, **keys: object) -> RunConfig:
    given = {"dataset": "characters", "data-root": str(root), **keys}
    return RunConfig.from_mapping({key.replace("_", "-"): value for key, value in given.items()})


def write_writer(root: Path, name: str, labels: list[int], **more: object) -> None:
    """Write a file of images whose first pixel is the label."""
    x = np.zeros((len(labels), 28, 28), np.uint8)
    x[:, 0, 0] = labels
    np.savez(root / f"{name}.npz", x=x, y=np.array(labels, np.uint8), **more)


# Selected classes.


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("all", list(range(62))),
        ("a-j", list(range(36, 46))),
        ("0-9", list(range(10))),
        # In the order of the labels, without duplicates.
        ("zA-C9A", [9, 10, 11, 12, 61]),
        ("9-A", [9, 10]),
    ],
)
def test_characters_are_named_one_by_one_or_in_ranges(text: str, labels: list[int]) -> None:
    assert kinds(text) == labels


@pytest.mark.parametrize("text", ["", "j-a", "a-", "-", "a,b", "ä", "a-ä", "_", "A - C"])
def test_an_invalid_choice_of_characters_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"characters '{text}' cannot be read: write all, or digit"):
        kinds(text)


# Selected writers.


def chosen(test: list[int] | None = None, **options: object) -> Writers:
    """Select from these writers: 0 with a, a, A; 1 with a, b, b, c; 2 with A, A."""
    y = np.array([A, A, 10, A, B, B, C, 10, 10])
    writer = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2])
    tested = None if test is None else np.isin(np.arange(9), test)
    return by_writer(y, writer, tested, CharacterOptions(**options), seed=0)  # type: ignore[arg-type]


def test_other_characters_are_left_out_and_the_rest_numbered_from_zero() -> None:
    found = chosen(characters="a-c")
    assert found.labels.tolist() == [0, 0, -1, 0, 1, 1, 2, -1, -1]
    assert (found.sizes.tolist(), found.num_classes, found.usable) == ([2, 4, 0], 3, 2)
    assert found.largest(2, "it").tolist() == [1, 0]
    with pytest.raises(UserError, match="only 2 writers with enough samples"):
        found.largest(3, "it")


def test_writers_with_too_few_characters_are_left_out() -> None:
    found = chosen(characters="a-c", classes_per_writer=2)
    own = found.labels[3:7][found.labels[3:7] >= 0]
    assert len(set(own)) == 2
    assert (found.sizes[0], found.sizes[2]) == (0, 0)
    assert found.sizes[1] == len(own)
    again = chosen(characters="a-c", classes_per_writer=2)
    assert found.labels.tolist() == again.labels.tolist()
    with pytest.raises(UserError, match="classes-per-writer is 4, but characters 'a-c' are only 3"):
        chosen(characters="a-c", classes_per_writer=4)


def test_the_seed_draws_which_characters_a_writer_keeps() -> None:
    y, writer = np.arange(36, 46).repeat(2), np.zeros(20, np.int64)
    options = CharacterOptions(characters="a-j", classes_per_writer=5)
    drawn = {tuple(by_writer(y, writer, None, options, seed).labels) for seed in range(5)}
    assert len(drawn) > 1
    assert all(sum(label >= 0 for label in labels) == 10 for labels in drawn)


def test_characters_in_turn_go_round_as_far_as_a_writer_has_them() -> None:
    # Writers 0 and 1 have a to d, twice each; writer 2 has a to c.
    y, writer = np.tile(np.arange(36, 40), 6), np.arange(3).repeat(8)
    has_it = ~((writer == 2) & (y == 39))
    options = CharacterOptions("a-d", classes_per_writer=2, writers_classes="in-turn")
    found = by_writer(y[has_it], writer[has_it], None, options, seed=0)
    kept = [set(found.labels[writer[has_it] == one].tolist()) - {-1} for one in range(3)]
    assert kept == [{0, 1}, {1, 2}, {2}]
    assert found.sizes.tolist() == [4, 4, 2]


def test_users_with_few_samples_are_left_out() -> None:
    assert chosen(least_samples=4).sizes.tolist() == [0, 4, 0]


def test_every_client_needs_samples_of_both_kinds_where_the_data_say_which_are_for_testing() -> (
    None
):
    # Test samples: writer 0 an A, writer 1 a c, writer 2 an A.
    assert chosen([2, 6, 7]).sizes.tolist() == [3, 4, 2]
    assert chosen([2, 6, 7], characters="a-c").sizes.tolist() == [0, 4, 0]


# Folders.


def test_a_folder_of_characters_is_read(tmp_path: Path) -> None:
    write_writer(tmp_path, "pen_1", [A, A, 10])
    write_writer(tmp_path, "pen_2", [A, B, B, C] * 5)
    write_writer(tmp_path, "ink_3", [C] * 10 + [10] * 30)
    config = datasets.with_defaults(writers_of(tmp_path, characters="a-c"))
    assert (config.clients, config.model) == (3, "cnn")
    assert datasets.data_shape(config) == DataShape((1, 28, 28), 3)
    data = datasets.all_clients(config)
    # In the order of the files; a fifth of the samples is for testing.
    assert [len(client.y_train) + len(client.y_test) for client in data] == [10, 2, 20]
    assert set(data[0].y_train) == {2}
    assert set(data[2].y_train) | set(data[2].y_test) == {0, 1, 2}
    # Files with the same prefix form a group; images keep their labels.
    assert [client.group for client in data] == [0, 1, 1]
    dataset = datasets.load(config)
    np.testing.assert_array_equal(dataset.x[:, 0, 0, 0], dataset.y + A)
    two = datasets.all_clients(writers_of(tmp_path, characters="a-c", clients=2))
    assert [client.group for client in two] == [0, 1]
    with pytest.raises(UserError, match=r"Too many clients: 4, but .* has only 3 writers"):
        datasets.load(writers_of(tmp_path, characters="a-c", clients=4))


def test_a_folder_of_characters_may_state_its_test_samples(tmp_path: Path) -> None:
    for name in ("1", "2"):
        write_writer(tmp_path, name, [A, B, B, A], heldout=np.array([True, False, False, False]))
    config = writers_of(tmp_path, characters="ab", clients=2)
    data = datasets.client_data(config, 1)
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([1, 1, 0], [0])
    with pytest.raises(UserError, match="only 0 writers"):
        datasets.load(writers_of(tmp_path, characters="b", clients=1))


def test_files_without_characters_are_reported(tmp_path: Path) -> None:
    np.savez(tmp_path / "1.npz", x=np.zeros((4, 3)), y=np.arange(4))
    with pytest.raises(UserError, match=r"holds no characters.*dataset npz-folder"):
        datasets.load(writers_of(tmp_path, clients=1))
    with pytest.raises(UserError, match="characters needs the folder"):
        datasets.load(RunConfig(dataset="characters", clients=1))


def test_the_real_characters_by_writer() -> None:
    if not (REAL / "unipen_by_writer").is_dir():
        pytest.skip("no unipen_by_writer")
    config = datasets.with_clients(writers_of(REAL, characters="a-j", classes_per_writer=5))
    assert config.clients == 200
    clients = datasets.all_clients(config)
    assert all(len(set(client.y_train) | set(client.y_test)) == 5 for client in clients)
    assert sum(len(client.y_train) + len(client.y_test) for client in clients) > 10_000
    assert datasets.data_shape(config).num_classes == 10
