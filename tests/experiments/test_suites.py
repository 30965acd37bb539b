"""Suites: variants, published tables, sweeps and their validation."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from runs_here import run_all
from typer.testing import CliRunner

from raceme.cli import app
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.datasets import client_data
from raceme.experiments.suites import (
    SHIPPED,
    Published,
    all_shipped,
    load_suite,
    variants,
)

MATRIX = """
title = "Waiting"
seeds = [0, 1]
notes = ["{devices}", "Two seeds."]

[settings]
clients = 20
fedbuff = { k = 5 }

[methods]
casa = {}
fedbuff = {}
grouped = { strategy = "ifca", sweep = { k = [] } }

[axes.data.iris]
title = "Iris"
settings = { dataset = "synthetic", fedbuff = { server-lr = 0.5 } }

[axes.data.digits]
title = "Digits"
settings = { dataset = "digits" }

[axes.devices]
slow = { title = "slow devices", notes = ["A third is slow."], settings = { devices = "slow30x5" } }

[variants.iris-slow]
data = "iris"
devices = "slow"
settings = { clients = 6 }
methods.grouped.sweep.k = [2]

[variants.digits-even]
data = "digits"
methods.grouped.sweep.k = [3, 4]

[variants.other]
title = "elsewhere"
methods.grouped.sweep.k = [1]

[[published]]
numbers = ["accuracy", "time"]
remark = "of other devices."
columns = ["iris-slow", "digits-even"]
[published.rows]
casa    = [[97.5, 3],   [91.0, "/"]]
fedbuff = [["-", "-"],  ["-", 8.5]]
grouped = [[96.0, 4.0], [{ k = 3, accuracy = 88.0 }, { k = 4, accuracy = 89.5, time = 2 }]]
"""
COMPLETE = f'unpublished = ["other"]\n{MATRIX}'


def written(folder: Path, text: str) -> Path:
    path = folder / "waiting.toml"
    path.write_text(text)
    return path


def test_variants_of_a_matrix(tmp_path: Path) -> None:
    path = written(tmp_path, COMPLETE)
    named = variants(path)
    assert list(named) == ["digits-even", "iris-slow", "other"]
    slow, even, other = (load_suite(named[name]) for name in ("iris-slow", "digits-even", "other"))
    assert (slow.title, slow.seeds) == ("Waiting, Iris, slow devices", (0, 1))
    assert (even.title, other.title) == ("Waiting, Digits", "Waiting, elsewhere")
    # A variant's setting overrides the suite's; notes
    # of an axis are placed where the axis is named.
    assert slow.settings == {
        "clients": 6,
        "fedbuff.k": 5,
        "fedbuff.server-lr": 0.5,
        "dataset": "synthetic",
        "devices": "slow30x5",
    }
    assert even.settings == {"clients": 20, "fedbuff.k": 5, "dataset": "digits"}
    assert slow.notes == ("A third is slow.", "Two seeds.")
    assert even.notes == other.notes == ("Two seeds.",)
    assert [method.label for method in slow.methods] == ["casa", "fedbuff", "grouped"]
    remark = "of other devices."
    assert [method.published for method in slow.methods] == [
        (Published(97.5, 3.0, remark=remark),),
        (),
        (Published(96.0, 4.0, remark=remark),),
    ]
    assert [method.published for method in even.methods] == [
        (Published(91.0, math.inf, remark=remark),),
        (Published(None, 8.5, remark=remark),),
        (Published(88.0, options={"k": 3}), Published(89.5, 2.0, options={"k": 4})),
    ]
    assert [point["k"] for point in even.methods[2].sweep] == [3, 4]
    assert not any(method.published for method in other.methods)


def test_a_suite_sweeps_general_keys_beside_hyper_parameters(tmp_path: Path) -> None:
    text = "[methods.casa]\nsweep = { lr = [0.1, 0.4], gamma = [0.2] }\n"
    points = load_suite(written(tmp_path, text)).methods[0].variants()
    assert [point.settings for point in points] == [{"lr": 0.1}, {"lr": 0.4}]
    assert [point.options for point in points] == [{"gamma": 0.2}] * 2


def test_published_numbers_of_another_dataset_are_said(tmp_path: Path) -> None:
    named = variants(written(tmp_path, COMPLETE))
    even, other = (load_suite(named[name]) for name in ("digits-even", "other"))
    said = "The published numbers are of digits, and these runs of mnist."
    assert even.with_settings({"dataset": "mnist"}).notes == ("Two seeds.", said)
    assert even.with_settings({"dataset": "digits", "clients": 8}).notes == ("Two seeds.",)
    assert other.with_settings({"dataset": "mnist"}).notes == ("Two seeds.",)


def test_a_suite_extends_a_variant(tmp_path: Path) -> None:
    written(tmp_path, COMPLETE)
    path = tmp_path / "longer.toml"
    path.write_text('extends = "waiting.toml.iris-slow"\nseeds = [7]\nsettings.clients = 9')
    suite = load_suite(path)
    assert (suite.title, suite.seeds) == ("Waiting, Iris, slow devices", (7,))
    assert (suite.settings["clients"], suite.settings["dataset"]) == (9, "synthetic")
    # A suite of the package, by its name.
    path.write_text('extends = "casa-table1.mnist"\nseeds = [7]')
    assert load_suite(path).settings == load_suite("casa-table1.mnist").settings


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            'casa    = [[97.5, 3],   [91.0, "/"]]',
            "",
            "no row 'casa', column 'iris-slow'",
        ),
        ("casa    = [", "caas    = [", "Unknown method: row 'caas', column 'iris-slow'"),
        ('unpublished = ["other"]', "", "no column 'other' of the published tables in"),
        ('unpublished = ["other"]', 'unpublished = ["othre"]', "Did you mean 'other'"),
        ('columns = ["iris-slow"', 'columns = ["iris-slwo"', "Did you mean 'iris-slow'"),
        ('[91.0, "/"]]', "]", "The row casa in "),
        ("[97.5, 3]", "97.5", "row 'casa', column 'iris-slow' of the published table in"),
        ('devices = "slow"', 'devices = "slwo"', "Unknown devices of iris-slow in the suite"),
        ('data = "iris"', 'dta = "iris"', "Unknown key of variants.iris-slow in the suite"),
        ('data = "iris"', 'data = ["iris"]', "Unknown data of iris-slow in the suite"),
        ("[axes.data.iris]", "[axes.data.iris]\nclients = 3", "Unknown key of axes.data.iris"),
        ("[variants.iris-slow]", "[variants]\niris-slow = 3\n[x]", "Unknown key of the suite"),
        ('numbers = ["acc', 'numbers = ["ac', "Did you mean 'accuracy'"),
        ('columns = ["iris-slow", "digits-even"]', "columns = 3", "columns in the suite"),
        ('numbers = ["acc', 'nmbers = ["acc', "Unknown key of published in the suite"),
    ],
)
def test_what_is_wrong_in_a_matrix(old: str, new: str, words: str, tmp_path: Path) -> None:
    assert old in COMPLETE
    path = written(tmp_path, COMPLETE.replace(old, new, 1))
    with pytest.raises(UserError) as failed:
        load_suite(f"{path}.{'other' if 'other' in words else 'iris-slow'}")
    assert words in str(failed.value)
    assert str(path) in str(failed.value)
    assert "\n" not in str(failed.value)


def test_a_variant_has_to_be_named(tmp_path: Path) -> None:
    path = written(tmp_path, COMPLETE)
    with pytest.raises(UserError, match=r"has variants: .*iris-slow, digits-even, other"):
        load_suite(path)
    with pytest.raises(UserError, match="Did you mean 'iris-slow'"):
        load_suite(f"{path}.iris-slwo")
    plain = tmp_path / "plain.toml"
    plain.write_text("[methods.casa]\n[[published]]\ncolumns = []")
    with pytest.raises(UserError, match="published table and no variants"):
        load_suite(plain)
    assert variants(plain.with_name("waiting.toml.other")) == {}


def test_compare_runs_the_variants_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raceme.experiments.jobs.run_jobs", run_all)
    path, out = written(tmp_path, COMPLETE), tmp_path / "out"
    command = ["compare", "fedbuff", "--suite", str(path), "--out", str(out), "--max-updates", "8"]
    ran = CliRunner().invoke(app, [*command, "--only", "iris-slow", "--seeds", "0"])
    assert ran.exit_code == 0, ran.output
    assert (out / "iris-slow" / "fedbuff" / "seed-0" / "summary.json").is_file()


def test_variants_of_the_package_have_names() -> None:
    found = all_shipped()
    assert sum(map(len, found.values())) == 145
    assert found["casa-table1"]["mnist"] == "casa-table1.mnist"
    assert load_suite("casa-table1.mnist").title == "CASA, Table 1, MNIST"
    assert len(list(SHIPPED.glob("*.toml"))) <= 25


# Held-out training samples, so that tuning never sees the test samples.


def rows(x: np.ndarray) -> list[bytes]:
    return sorted(sample.tobytes() for sample in x)


def test_validation_samples_are_training_samples() -> None:
    whole = RunConfig(clients=8)
    for client in range(8):
        own = client_data(whole, client)
        trial = client_data(whole.with_values(validation_fraction=0.25), client)
        assert rows(np.concatenate([trial.x_train, trial.x_test])) == rows(own.x_train)
        assert not set(rows(trial.x_test)) & set(rows(own.x_test))
        assert len(trial.y_test) == round(0.25 * len(own.y_train))
        assert len(trial.x_test) == len(trial.y_test)


def test_the_held_out_samples_follow_from_the_seed() -> None:
    config = RunConfig(clients=8, validation_fraction=0.25)
    one, again = client_data(config, 3), client_data(config, 3)
    assert rows(one.x_test) == rows(again.x_test)
    # The held-out samples are not simply the last ones, which may all have one label.
    kept = client_data(config.with_values(validation_fraction=0.0), 3).x_train
    assert rows(one.x_test) != rows(kept[-len(one.x_test) :])


def test_what_cannot_be_held_out_is_said() -> None:
    # 359 clients with five samples each: four are for testing, and one remains for training.
    config = RunConfig(clients=359, partition="iid", test_fraction=0.8, validation_fraction=0.2)
    with pytest.raises(UserError, match="Client 0 has a single training sample"):
        client_data(config, 0)
    with pytest.raises(UserError, match="validation-fraction must be below 1"):
        RunConfig(validation_fraction=1.0)
