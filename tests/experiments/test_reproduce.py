"""The suites of the papers' experiments that are part of the package."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raceme.cli import app
from raceme.core.errors import UserError
from raceme.datasets.npz import FolderOptions
from raceme.experiments.suites import Timing, all_shipped, load_suite, shipped
from raceme.strategies import FedAsyncParameters

SUITES = [name for variants in all_shipped().values() for name in variants.values()]

COLUMNS = ("mnist", "cifar10", "femnist", "imu", "harbox")
TABLE1 = """
standalone | 98.26, 4.9 | 82.6, 35.2 | 93.95, / | 90.00, 41.9 | 69.48, /
fedavg | 97.92, 80.24 | 69.49, / | 98.34, 85.01 | 85.71, 89.08 | 82.90, 251.42
fedprox | 97.31, 104.68 | 65.83, / | 98.14, 114.34 | 87.57, 96.05 | 81.80, 390.96
cfl | 99.42, 30.63 | 90.50, 209.55 | 98.75, 75.14 | 86.29, 94.93 | 85.06, 170.99
ifca | 3:99.40, 11.21 | 3:89.10, 209.62 | 2:97.77, 145.34 | 2:94.28, 80.73 | 2:83.73, 334.34
ifca | 4:99.50, 12.8 | 4:90.88, 77.88 | 5:96.59, 237.46 | 3:92.67, 73.28 | 4:85.06, 226.53
ifca | 5:99.48, 5.61 | 5:91.14, 80.39 | 8:95.37, 279.85 | 4:91.81, 148.6 | 6:87.09, 220.98
icfl | 98.68, 12.18 | 84.19, 36.49 | 95.35, 121.65 | 93.23, 30.45 | 82.58, 126.43
fedasync | 97.46, 109.53 | 67.66, / | 96.97, 183.57 | 86.86, 64.9 | 78.72, 158.97
fedbuff | 99.25, 53.31 | 61.11, / | 98.21, 82.63 | 80.00, 282.9 | 81.62, 55.7
cfl-async | 99.23, 9.54 | 89.97, 145.8 | 98.68, 36.67 | 87.71, 69.3 | 82.43, 59.8
ifca-async | 3:99.28, 9.53 | 3:83.41, 195.30 | 2:98.39, 81.07 | 2:89.61, 143.1 | 2:77.58, 252.6
ifca-async | 4:98.88, 8.83 | 4:88.99, 80.70 | 5:97.78, 118.27 | 3:85.62, 143.1 | 4:78.13, 215.2
ifca-async | 5:99.32, 8.57 | 5:87.98, 83.20 | 8:97.62, 126.77 | 4:89.14, 87.77 | 6:76.81, 236.3
icfl-async | 98.82, 5 | 83.30, 25.3 | 94.66, / | 91.52, 81.83 | 79.65, 92.00
casa | 99.52, 2.80 | 91.45, 23.4 | 98.97, 36.2 | 95.33, 37.47 | 87.38, 54.8
casa-plus | 99.34, 4.80 | 90.64, 20.3 | 98.53, 35.03 | 94.57, 22.71 | 87.21, 53.6
"""
"""Liu et al., "CASA", KDD 2024, Table 1: accuracy in percent, time to the target."""
TABLE2 = """
standalone | 70.47, 498.9 | 70.43, 531.2
fedavg | 83.18, 1115.93 | 81.15, 2015.19
fedprox | 81.32, 1190.16 | 80.19, 2056.94
cfl | 83.27, 977.43 | 84.17, 1614.84
ifca | 84.45, 707.24 | 85.85, 1687.42
icfl | 82.09, 1019.7 | 82.12, 2095.65
fedasync | 80.23, 419.1 | 79.32, 489.3
fedbuff | 82.14, 400.1 | 80.32, 528.8
casa | 87.61, 346.6 | 87.81, 374.6
"""
"""Table 2: scenarios A and B, accuracy in percent, time to convergence."""
TARGETS = {"mnist": 0.95, "cifar10": 0.80, "femnist": 0.95, "imu": 0.80, "harbox": 0.75}


Row = tuple[int | None, float, float]


def row_of(cell: str) -> Row:
    """Read "k: accuracy, time", or the same without a k."""
    k, colon, numbers = cell.rpartition(":")
    accuracy, time = numbers.split(",")
    number = math.inf if time.strip() == "/" else float(time)
    return int(k) if colon else None, float(accuracy), number


@pytest.mark.parametrize("name", SUITES)
def test_every_key_of_a_suite_is_valid(name: str) -> None:
    suite = load_suite(name)
    of_casa = name.startswith("casa")
    assert suite.reference is not None or not of_casa
    for method in suite.methods:
        for variant in method.variants():
            config = suite.config(variant, suite.seeds[0])
            assert (config.strategy, config.stop_at_target) == (method.strategy, False)
            assert variant.row is None or variant.row in method.published
            if of_casa:
                # The paper's appendix A.2.
                assert (config.batch_size, config.lr, config.local_epochs) == (10, 0.01, 1)
                folder = config.read(FolderOptions).data_folder
                assert config.clients == {"imu": 7, "uci-har": 30}.get(folder, 100)
                assert config.model == ("mlp300" if folder else "cnn-fedrep")


@pytest.mark.parametrize("column", COLUMNS)
def test_published_numbers_of_table_1(column: str) -> None:
    suite = load_suite(shipped("casa-table1")[column])
    place = 1 + COLUMNS.index(column)
    expected: dict[str, set[Row]] = {}
    for line in TABLE1.strip().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        expected.setdefault(cells[0], set()).add(row_of(cells[place]))
    assert {
        method.label: {(row.options.get("k"), row.accuracy, row.time) for row in method.published}
        for method in suite.methods
    } == expected
    # Every point of a sweep is compared with the published row of its own k.
    for label in ("ifca", "ifca-async"):
        (method,) = suite.only([label]).methods
        assert {k for k, _, _ in expected[label]} == {v.options["k"] for v in method.variants()}
        for variant in method.variants():
            row = variant.row
            assert (variant.options["k"], row.accuracy, row.time) in expected[label]
    config = suite.config(suite.methods[0], 0)
    folder = config.read(FolderOptions).data_folder
    assert (folder or config.dataset, config.target_accuracy) == (column, TARGETS[column])
    assert config.devices == "slow30x5"


@pytest.mark.parametrize("part", ["characters", "uci-har"])
def test_open_data_in_the_place_of_the_paper_s_have_no_published_numbers(part: str) -> None:
    suite = load_suite(shipped("casa-table1")[part])
    folder = suite.config(suite.methods[0], 0).read(FolderOptions).data_folder
    assert (folder or suite.dataset) == part
    assert not any(method.published for method in suite.methods)
    # Asynchronous methods get as many updates as 500 rounds of all clients.
    fedavg = suite.config(suite.only(["fedavg"]).methods[0], 0)
    assert fedavg.max_updates == 500 * fedavg.clients


def test_the_paper_s_hyper_parameters() -> None:
    suite = load_suite(shipped("casa-table1")["mnist"])
    configs = {method.label: suite.config(method.variants()[0], 0) for method in suite.methods}
    keys = {label: config.parameters() for label, config in configs.items()}
    assert (keys["casa"].alpha0, keys["casa"].gamma) == (2.0, 0.15)
    assert keys["fedprox"].proximal_mu == 0.05
    assert keys["fedasync"] == FedAsyncParameters(alpha=0.3, decay="hinge", a=1.0, b=4.0)
    assert keys["fedbuff"].k == 10
    assert (keys["icfl"].alpha_start, keys["icfl"].epsilon) == (0.85, 4.0)
    assert keys["icfl-async"].time_decay == 0.01
    assert {configs[label].max_updates for label in configs} == {50000}
    swept = {method.label for method in suite.methods if method.is_swept}
    assert swept == {"ifca", "ifca-async", "cfl", "cfl-async", "fedasync"}


def test_numbers_of_the_other_experiments() -> None:
    for number, variant in enumerate(("a", "b"), start=1):
        suite = load_suite(shipped("casa-table2")[variant])
        expected = {}
        for line in TABLE2.strip().splitlines():
            cells = [cell.strip() for cell in line.split("|")]
            expected[cells[0]] = row_of(cells[number])[1:]
        assert {
            method.label: (row.accuracy, row.time)
            for method in suite.methods
            for row in method.published
        } == expected
        # The paper does not give IFCA's k: every point is compared with the row.
        (ifca,) = suite.only(["ifca"]).methods
        assert [point.row.accuracy for point in ifca.variants()] == [expected["ifca"][0]] * 3
        # Standalone never reaches 75 %, and has a published time nevertheless.
        assert suite.timing is Timing.CONVERGENCE
        profile = {"a": "range1to5", "b": "slow30x10"}[variant]
        assert suite.config(suite.methods[0], 0).devices == profile
    assert all(load_suite(path).timing is Timing.TARGET for path in shipped("casa-table1").values())
    # Section 5.3.1: below CASA, without clusters and with a constant weight.
    for variant, loss in (("cifar10", (23.62, 34.23)), ("harbox", (7.74, 12.37))):
        ablations = load_suite(shipped("casa-fig8")[variant])
        table1 = load_suite(shipped("casa-table1")[variant]).only(["casa", "casa-plus"]).methods
        rows = [method.row.accuracy for method in ablations.methods]
        assert rows[:2] == [method.row.accuracy for method in table1]
        assert [rows[0] - row for row in rows[2:]] == pytest.approx(list(loss))
    budgets = [m.options["budget"] for m in load_suite(shipped("casa-fig9-10")["buffer"]).methods]
    assert budgets == [5, 10, 20, 50, 75, 100]
    alphas = [m.options["alpha"] for m in load_suite(shipped("casa-fig9-10")["alpha"]).methods]
    assert alphas == [0.3, 0.5, 0.7, 0.9]


def test_the_competitors_are_swept_alike() -> None:
    for path in shipped("casa-table1").values():
        suite = load_suite(path)
        points = {method.label: [v.options for v in method.variants()] for method in suite.methods}
        # The sweep contains the paper's own points.
        assert {"eps1": 0.4, "eps2": 0.7} in points["cfl"]
        assert {"eps1": 0.4, "eps2": 1.0} in points["cfl-async"]
        hinge, polynomial = points["fedasync"]
        assert hinge == {"decay": "hinge", "a": 1.0}
        assert polynomial == {"decay": "polynomial", "a": 0.5}
        assert suite.config(suite.methods[0], 0).validation_fraction == 0
        assert suite.config(suite.methods[0], 0, trial=True).validation_fraction == 0.2


def test_figure_10b_is_judged_by_unrest_and_not_by_times() -> None:
    suite = load_suite(shipped("casa-fig9-10")["k"])
    table1 = load_suite(shipped("casa-table1")["cifar10"])
    assert suite.shows_unrest
    for method in suite.methods:
        (swept,) = table1.only([method.strategy]).methods
        same = {v.row.accuracy for v in swept.variants() if v.options["k"] == method.options["k"]}
        assert {method.row.accuracy} == same
        assert method.row.time is None


def test_tables_that_others_made() -> None:
    """Flower's niid_bench (README), PFLlib (docs/benchmark.html), CFLA (README)."""
    found = {part: load_suite(path) for part, path in shipped("external").items()}
    published = {
        part: {method.label: method.row.accuracy for method in suite.methods if method.row}
        for part, suite in found.items()
    }
    assert published == {
        "niid-bench-mnist": {"fedavg": 98.89, "fedprox": 99.02},
        "niid-bench-fashion": {"fedavg": 88.09, "fedprox": 88.15},
        "niid-bench-cifar10": {"fedavg": 62.47, "fedprox": 65.63},
        "niid-bench-cifar10-iid": {"fedavg": 71.32},
        "pfllib-fashion": {
            "fedavg": 85.85,
            "fedprox": 85.63,
            "apfl": 97.25,
            "ditto": 97.47,
            "fedper": 97.44,
            "fedrep": 97.56,
        },
        "pfllib-fashion-two-classes": {
            "fedavg": 80.41,
            "fedprox": 78.08,
            "apfl": 99.41,
            "ditto": 99.44,
            "fedper": 99.47,
            "fedrep": 99.56,
        },
        "cfla-mnist": {"ifca": 97.3, "fedgroup": 91.5, "fesem": 90.4},
    }
    lengths = {"niid": (10, 50, 64, 10), "pfllib": (20, 2000, 10, 1), "cfla": (50, 100, 32, 3)}
    for part, suite in found.items():
        config = suite.config(suite.methods[0], 0)
        work = (config.clients, config.max_rounds, config.batch_size, config.local_epochs)
        assert work == lengths[part.split("-")[0]]
        assert {"casa", "panicle"} <= {method.label for method in suite.methods}


def test_reproduce_as_a_person_types_it(tmp_path: Path) -> None:
    listed = CliRunner().invoke(app, ["reproduce"])
    assert "casa-table1: characters, cifar10, femnist, harbox, imu, mnist, uci-har" in listed.output
    for arguments, words in (
        (["casa-table3"], "Unknown reproduction 'casa-table3'. Did you mean 'casa-table"),
        (["casa-table1"], "choose one with --dataset, or parts with --only (characters, cifar10,"),
        (["casa-table1", "--dataset", "mnits"], "Did you mean 'mnist'"),
        (["casa-table1", "--dataset", "mnist"], "--data-root"),
        (["casa-table1", "--only", "mnist,imuu"], "Unknown part of casa-table1 'imuu'. Did you"),
        (["casa-table1", "--only", "mnist,imu", "--dataset", "cifar10"], "Unknown dataset of"),
        # Parts may use several datasets; MNIST is the first one whose files are missing.
        (["casa-table1", "--only", "mnist,imu"], "--data-root"),
        (["casa-table1", "--dataset", "mnist", "--scale", "0"], "--scale must be above 0"),
        (["casa-table1", "--dataset", "mnist", "--methods", "cas"], "Did you mean 'casa'"),
    ):
        out = tmp_path / "out"
        failed = CliRunner().invoke(app, ["reproduce", *arguments, "--out", str(out)])
        assert isinstance(failed.exception, UserError)
        assert words in str(failed.exception)
        assert not out.exists()
