"""Spoken digits by speaker and UCI HAR by person, on small generated files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError

REAL = Path(os.environ.get("RACEME_TEST_DATA", "../shared/data"))


def config_of(root: Path, clients: int | None = None, dataset: str = "fsdd") -> RunConfig:
    config = RunConfig(dataset=dataset, data_root=str(root), clients=clients)
    return datasets.with_defaults(config)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two speakers, of each digit ten takes: the spectrum of recording i is full of i."""
    folder = tmp_path / "fsdd_by_speaker"
    folder.mkdir()
    for first, name in ((0, "anna"), (100, "ben")):
        x = np.broadcast_to((first + np.arange(100.0))[:, None, None], (100, 32, 32))
        y = np.repeat(np.arange(10), 10).astype(np.uint8)
        np.savez(folder / f"speaker_{name}.npz", x=x.astype(np.float16), y=y, take=y)
    return tmp_path


def test_the_clients_of_a_speaker_have_its_recordings_in_turn(root: Path) -> None:
    config = config_of(root, 4)
    assert datasets.true_groups(config) == (0, 0, 1, 1)
    assert config.model == "cnn"
    dataset = datasets.load(config)
    assert dataset.shape.input_shape == (1, 32, 32)
    for client, first in enumerate((0, 1, 100, 101)):
        data = datasets.client_data(config, client)
        x, y = (
            np.concatenate(pair)
            for pair in ((data.x_train, data.x_test), (data.y_train, data.y_test))
        )
        assert (len(data.y_train), np.bincount(y).tolist()) == (40, [5] * 10)
        recordings = np.round(x[:, 0, 0, 0] * dataset.std.ravel() + dataset.mean.ravel())
        assert sorted(recordings.tolist()) == list(range(first, first + 100, 2))
    # One mean and one deviation of all, by what is for training.
    train = np.concatenate([dataset.inputs(own) for own in dataset.users or ()])
    assert (train.mean(), train.std()) == pytest.approx((0, 1), abs=1e-3)


def test_an_uneven_number_gives_the_first_speaker_more_clients(root: Path) -> None:
    assert datasets.true_groups(config_of(root, 3)) == (0, 0, 1)
    assert config_of(root).clients == 24


def test_what_is_not_there_or_not_enough_is_one_clear_line(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There are no \.npz files in"):
        datasets.load(config_of(tmp_path / "none", 4))
    with pytest.raises(UserError, match="has 2 speakers, of which each is at least one client"):
        datasets.load(config_of(root, 1))
    with pytest.raises(UserError, match="too few recordings for 160 clients"):
        datasets.load(config_of(root, 160))
    np.savez(tmp_path / "numbers.npz", x=np.zeros((4, 9)), y=[0] * 4)
    with pytest.raises(UserError, match="holds no spectra of speakers"):
        datasets.load(config_of(tmp_path, 2))


def test_people_are_found_in_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "uci_har_by_person"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in (1, 2):
        x, heldout = rng.normal(size=(8, 9, 128)).astype(np.float16), np.arange(8) % 4 == 0
        np.savez(folder / f"person_{number}.npz", x=x, y=np.arange(8) % 6, heldout=heldout)
    config = config_of(tmp_path, dataset="uci-har")
    assert (config.clients, config.model, config.lr) == (2, "cnn1d", 0.05)
    assert len(datasets.client_data(config, 1).y_test) == 2


@pytest.mark.skipif(not (REAL / "fsdd_by_speaker").is_dir(), reason="no such data")
def test_the_real_speakers_and_people() -> None:
    config = config_of(REAL.resolve())
    assert np.bincount(np.array(datasets.true_groups(config), int)).tolist() == [4] * 6
    data = datasets.client_data(config, 5)
    assert (len(data.y_train), len(data.y_test)) == (100, 25)
    assert config_of(REAL.resolve(), dataset="uci-har").clients == 30
    writers = config_of(REAL.resolve(), 197, "characters")
    # The collections that writers come from are their groups, by the names of the files.
    assert len(set(datasets.true_groups(writers))) == 15
