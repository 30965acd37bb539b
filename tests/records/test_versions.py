"""Versions of clusters' models: permitted versions, retention, and recovery after a crash."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path

import numpy as np
import pytest

from raceme.core.errors import UserError
from raceme.records.versions import VERSIONS, Pair, Stage, Version, VersionStore, is_no_worse, kept

NAN = math.nan
MODEL = {"w": np.arange(3, dtype=np.float32)}


@pytest.mark.parametrize(
    ("pairs", "allowed"),
    [
        # Differences and the margin: 0.90 - 0.92 + 0.02 = 0.
        ([(0.90, 0.92)], True),
        ([(0.89, 0.92)], False),
        # +0.03, -0.05, +0.01: the median counts, so that a single device cannot block a version.
        ([(0.93, 0.92), (0.1, 0.17), (0.91, 0.92)], True),
        # +0.03, -0.05: the lower one of two counts.
        ([(0.93, 0.92), (0.1, 0.17)], False),
        # Without a comparison it is enough that the version works.
        ([(0.2, NAN)], True),
        ([(NAN, NAN)], False),
        ([(NAN, 0.5), (0.6, 0.5), (0.6, 0.5)], True),
        ([], False),
    ],
)
def test_a_version_may_be_worse_by_the_margin(pairs: list[Pair], allowed: bool) -> None:
    assert is_no_worse(pairs, 0.02) is allowed


def test_of_errors_lower_is_better_and_the_margin_is_a_share() -> None:
    # 1.02 · 5.0 = 5.1.
    assert is_no_worse([(5.1, 5.0)], 0.02, of_errors=True)
    assert not is_no_worse([(5.2, 5.0)], 0.02, of_errors=True)
    assert not is_no_worse([(math.inf, 5.0)], 0.02, of_errors=True)


def versions_of(*scores: float, stage: Stage = Stage.FORMER) -> list[Version]:
    return [Version(0, number, number, stage, s) for number, s in enumerate(scores, start=1)]


@pytest.mark.parametrize(
    ("scores", "of_errors", "numbers"),
    [
        ((0.5, 0.9, 0.7, 0.8, 0.6), False, [2, 4, 5]),
        # Among equal scores, the latest version wins.
        ((0.9, 0.9, 0.7, 0.8, 0.6), False, [2, 4, 5]),
        ((0.5, 0.9, 0.7, 0.8, 0.6), True, [1, 4, 5]),
        ((NAN, NAN, NAN), False, [2, 3]),
        ((), False, []),
    ],
)
def test_the_last_versions_and_the_best_are_kept(
    scores: tuple[float, ...], of_errors: bool, numbers: list[int]
) -> None:
    assert [version.number for version in kept(versions_of(*scores), 2, of_errors)] == numbers


def test_the_version_in_use_and_a_new_one_are_kept() -> None:
    versions = [*versions_of(0.1, stage=Stage.IN_USE), *versions_of(0.2, 0.3, 0.4, 0.5)[1:]]
    assert [version.number for version in kept(versions, 1)] == [1, 4]
    assert [version.number for version in kept(versions_of(0.1, 0.2, stage=Stage.TRIAL), 1)] == [
        1,
        2,
    ]


def files(run: Path) -> set[str]:
    return {path.name for path in (run / VERSIONS).iterdir()}


def test_versions_outlive_the_process(tmp_path: Path) -> None:
    store = VersionStore(tmp_path, 2)
    for number in range(1, 5):
        version = store.add(3, 10 * number, MODEL, {"a/b": {"w": MODEL["w"] + number}})
        store.change(version, Stage.IN_USE, 0.5)
    store.pinned.add(3)
    store.save()
    again = VersionStore(tmp_path, 2)
    assert again.run_id == store.run_id
    assert again.pinned == {3}
    assert again.of(3) == store.of(3)
    assert [(found.number, found.stage) for found in again.of(3)] == [
        (3, Stage.FORMER),
        (4, Stage.IN_USE),
    ]
    in_use = again.in_use(3)
    assert in_use is not None
    np.testing.assert_array_equal(again.load(in_use)["w"], [0, 1, 2])
    np.testing.assert_array_equal(again.load(in_use, "a/b")["w"], [4, 5, 6])
    np.testing.assert_array_equal(again.load(in_use, "other")["w"], [0, 1, 2])
    assert again.has_own(in_use, "a/b")
    assert not again.has_own(in_use, "other")
    assert files(tmp_path) == {"versions.json", "3-3.safetensors", "3-4.safetensors"}


def test_a_file_that_no_table_names_is_of_a_crash(tmp_path: Path) -> None:
    """After a kill between the two writes, the next process reuses the number."""
    store = VersionStore(tmp_path, 2)
    store.add(0, 1, MODEL, {})
    before = (tmp_path / VERSIONS / "versions.json").read_bytes()
    store.add(0, 2, MODEL, {})
    (tmp_path / VERSIONS / "versions.json").write_bytes(before)
    again = VersionStore(tmp_path, 2)
    assert [version.number for version in again.of(0)] == [1]
    assert again.add(0, 2, MODEL, {}).number == 2
    (tmp_path / VERSIONS / "9-9.safetensors").touch()
    again.save()
    assert files(tmp_path) == {"versions.json", "0-1.safetensors", "0-2.safetensors"}


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    store = VersionStore(tmp_path, 2)
    store.change(store.add(0, 1, MODEL, {}), Stage.IN_USE)
    store.save()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            store.add(0, 2, {"w": np.zeros(10_000, np.float32)}, {})
        with pytest.raises(OSError, match="File too large"):
            store.add(7, 2, {"w": np.zeros(10_000, np.float32)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [version.number for version in store.of(0)] == [1]
    assert store.clusters == [0]
    assert files(tmp_path) == {"versions.json", "0-1.safetensors"}
    assert store.add(0, 2, MODEL, {}).number == 2


def test_a_damaged_table_is_reported_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / VERSIONS).mkdir()
    (tmp_path / VERSIONS / "versions.json").write_text(json.dumps({"versions": 3}))
    with pytest.raises(UserError, match=r"cannot be read .*: remove .*versions, and"):
        VersionStore(tmp_path)
