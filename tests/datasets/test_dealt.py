"""Held-out samples of each distribution on the server, and invalid numbers of them."""

from pathlib import Path

import numpy as np
import pytest

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.datasets.source import DataShape
from raceme.runs import experiment


def config(**keys: object) -> RunConfig:
    base = RunConfig(dataset="digits", clients=8, partition="label-groups")
    return base.with_values(**{"options": {"groups": "0.5,0.5"}, **keys})


def rows(samples: np.ndarray) -> set[bytes]:
    return {sample.tobytes() for sample in samples}


@pytest.mark.parametrize("text", ["40", "0.5"])
@pytest.mark.parametrize("partition", ["label-groups", "rotation-groups"])
def test_no_client_has_what_the_server_has(text: str, partition: str) -> None:
    run = config(proxy=text, pretrain=50, partition=partition)
    held, pretraining = datasets.proxy_sets(run), datasets.pretraining(run)
    clients = datasets.all_clients(run)
    assert len(held.proxies) == len(held.tests) == len(pretraining) == 2
    for group, own in enumerate(held.proxies):
        if text == "40":
            assert len(own.x) == 40
        members = [client for client in clients if client.group == group]
        everything = [part for c in members for part in (c.x_train, c.x_test)]
        assert not rows(own.x) & rows(np.concatenate(everything))
        assert rows(held.tests[group].x) >= rows(np.concatenate([c.x_test for c in members]))
        assert len(pretraining[group].x) == 50
        assert all(len(client.x_test) for client in members)
    if partition == "rotation-groups":
        # The same images; the second group's are rotated by 180 degrees.
        turned = np.rot90(held.proxies[0].x, 2, axes=(2, 3))
        assert np.array_equal(turned, held.proxies[1].x)


def test_draws_of_a_mixture_leave_out_the_servers_samples() -> None:
    run = config(proxy="30", drift="mixture")
    held = datasets.proxy_sets(run)
    kept = rows(np.concatenate([own.x for own in held.proxies]))
    for client in range(8):
        for step in (0, 3):
            data = datasets.client_data(run, client, step)
            assert not kept & rows(np.concatenate([data.x_train, data.x_test]))


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"proxy": "1.5"}, "proxy '1.5' must be a whole number"),
        ({"proxy": "-3"}, "proxy '-3' must be"),
        ({"proxy": "5000"}, "asks for 5000 test samples of distribution 0, and"),
        ({"proxy": "3"}, "misses class"),
        ({"proxy": "20", "partition": "iid", "options": {}}, "have no groups"),
        ({"pretrain": 5000}, "pretrain 5000 is more than the"),
    ],
)
def test_impossible_numbers_of_samples_are_refused(keys: dict, told: str) -> None:
    read = datasets.pretraining if "pretrain" in keys else datasets.proxy_sets
    with pytest.raises(UserError, match=told):
        read(config(**keys))


def write(path: Path, classes: int = 10, **more: np.ndarray) -> None:
    y = np.arange(30) % classes
    np.savez(path, x=np.zeros((30, 1, 8, 8), np.float32), y=y, **more)


def test_a_folder_with_a_file_for_each_cluster(tmp_path: Path) -> None:
    extra = {"x_train": np.ones((9, 1, 8, 8), np.float32), "y_train": np.arange(9)}
    for name in ("a", "b"):
        write(tmp_path / f"{name}.npz", **extra)
    run = config(proxy=str(tmp_path), pretrain=5)
    held = datasets.proxy_sets(run)
    assert [len(own.y) for own in held.proxies] == [30, 30]
    assert held.tests == ()
    assert [len(own.y) for own in datasets.pretraining(run)] == [5, 5]


def test_a_server_without_data_learns_from_them_what_a_model_must_fit(tmp_path: Path) -> None:
    write(tmp_path / "a.npz", classes=7)
    run = RunConfig(dataset="npz", proxy=str(tmp_path))
    assert datasets.data_shape(run) == DataShape((1, 8, 8), 7)
    resolved = experiment.resolve(run)
    assert resolved.model == "cnn"
    assert len(datasets.proxy_sets(resolved).proxies) == 1
    # A file in the devices' format may declare classes that no sample has yet.
    x, y = np.zeros((4, 1, 8, 8)), np.arange(4)
    own = tmp_path / "sample.npz"
    np.savez(own, x_train=x, y_train=y, x_test=x, y_test=y, num_classes=np.array(9))
    named = run.with_values(data_file=str(own))
    assert datasets.data_shape(named).num_classes == 9
    # A device does not have the server's folder, and here its own file is missing.
    elsewhere = run.with_values(proxy=str(tmp_path / "elsewhere"))
    with pytest.raises(UserError, match="npz needs the file with the data"):
        datasets.data_shape(elsewhere)


def test_a_folder_is_found_from_where_the_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proxies").mkdir()
    write(tmp_path / "proxies" / "a.npz")
    monkeypatch.chdir(tmp_path)
    assert experiment.resolve(config(proxy="proxies")).proxy == str(tmp_path / "proxies")
    assert experiment.resolve(config(proxy="40")).proxy == "40"
    with pytest.raises(UserError, match=f"there is no folder {tmp_path}/other on this machine"):
        experiment.resolve(config(proxy="other"))


def test_mistakes_in_a_folder_of_proxy_sets_are_reported(tmp_path: Path) -> None:
    run = config(proxy=str(tmp_path))
    with pytest.raises(UserError, match=r"must be a folder with an \.npz file for each cluster"):
        datasets.proxy_sets(run)
    write(tmp_path / "a.npz", classes=9)
    with pytest.raises(UserError, match=r"a\.npz: y has no sample of class 9"):
        datasets.proxy_sets(run)
    write(tmp_path / "a.npz")
    with pytest.raises(UserError, match="lacks x_train and y_train, which pretrain needs"):
        datasets.pretraining(config(proxy=str(tmp_path), pretrain=5))
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 3), np.float32), y=np.arange(4))
    with pytest.raises(UserError, match=r"samples of shape \(1, 8, 8\)"):
        datasets.proxy_sets(run)
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 3), np.float32))
    with pytest.raises(UserError, match="lacks x or y"):
        datasets.proxy_sets(run)
    (tmp_path / "a.npz").write_bytes(b"no archive")
    with pytest.raises(UserError, match="Cannot read"):
        datasets.proxy_sets(run)
