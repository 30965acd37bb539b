"""Names of users' own components: lookup, and errors about unusable ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from raceme.core.config import RunConfig, all_keys, check_names, code_of
from raceme.core.errors import UserError
from raceme.core.registry import DATASETS, DEVICES, STRATEGIES, Registry, kebab, summary_of

MODULE = '''
"""Plug-ins of this test."""

from dataclasses import dataclass

from raceme.core.options import option
from raceme.strategies import FedAsync


@dataclass(frozen=True)
class Parameters:
    """Options."""

    speed: float = option(0.5, "how fast", above=0)


class Mine(FedAsync):
    """A method of one's own.

    With a second paragraph.
    """

    parameters_type = Parameters


class CASA(Mine):
    """Has the name of another."""


class Breaks(Mine):
    """Raises in its constructor."""

    def __init__(self, *arguments, **named):
        raise ValueError("out of\\nluck")


class Nothing:
    """Is no method."""


number = 3
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with modules, which is not on Python's path."""
    (tmp_path / "plugged.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("import raceme\n\nraise RuntimeError('not today')\n")
    (tmp_path / "misspelt.py").write_text("def f(:\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield tmp_path
    for name in ("plugged", "broken", "misspelt", "leaves"):
        sys.modules.pop(name, None)


def install(folder: Path, package: str, entries: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package that registers entry points."""
    info = folder / "site" / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(str(folder / "site"))


def strategies() -> Registry:
    """Return a registry of strategies that has not searched for entry points yet."""
    return Registry(
        "strategy",
        STRATEGIES._targets,
        group="raceme.strategies",
        expected="a subclass",
        declares="parameters_type",
        prefixed=True,
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plugged:Nothing", "is no strategy: expected a subclass of raceme.core.strategy.Method"),
        ("plugged:number", "has no Class 'number' for strategy"),
        ("plugged:Absent", "has no Class 'Absent' for strategy"),
        ("plugged:", "has no Class '' for strategy"),
        ("absent:Mine", "Cannot import 'absent' of strategy 'absent:Mine': No module named"),
        (":Mine", "Cannot import ''"),
        ("broken:Mine", "RuntimeError: not today (broken.py, line 3). Expected one of `raceme"),
        ("misspelt:Mine", "SyntaxError"),
        ("leaves:Mine", "SystemExit: 3 (leaves.py, line 1)"),
        ("plugged:CASA", "The keys of 'plugged:CASA' would be casa.KEY"),
        ("plugged:Breaks", "cannot be made: ValueError: out of (plugged.py, line 34)"),
        ("plugd", "Unknown strategy 'plugd'"),
    ],
)
def test_a_strategy_that_cannot_be_used_is_one_line(name: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        STRATEGIES.make(name)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_class_in_the_current_folder_is_found_and_its_keys_have_its_name() -> None:
    keys = {"strategy": "plugged:Mine", "mine.speed": "0.25"}
    config = RunConfig.from_mapping(keys)
    config.check_options()
    assert STRATEGIES["plugged:Mine"].__name__ == "Mine"
    assert config.parameters().speed == 0.25
    assert config.short_name == "mine-digits"
    assert RunConfig.from_mapping(config.to_mapping()) == config
    with pytest.raises(UserError, match=r"mine\.speed must be greater than 0"):
        RunConfig.from_mapping({**keys, "mine.speed": 0})
    with pytest.raises(UserError, match=r"Did you mean 'mine.speed'\?"):
        RunConfig.from_mapping({**keys, "mine.sped": 1})
    # The form in Flower's run config.
    assert RunConfig.from_mapping({"set": "strategy=plugged:Mine mine.speed=0.25"}) == config


def test_a_device_imports_no_strategy(folder: Path) -> None:
    keys = {"strategy": "plugged:Mine", "mine.speed": 2, "kmeans.k": 3}
    assert RunConfig.from_mapping(keys, lenient=True).strategy == "plugged:Mine"
    assert "plugged" not in sys.modules


def test_a_name_is_checked_without_an_import() -> None:
    check_names({"strategy": "plugged:Mine", "model": "auto", "devices": "fleet.toml"})
    assert "plugged" not in sys.modules
    with pytest.raises(UserError, match="Did you mean 'slow30x5'"):
        check_names({"devices": "slow30"})


def test_an_installed_package_adds_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(folder, "garden", "[raceme.strategies]\nown-pace = plugged:Mine\n", monkeypatch)
    registry = strategies()
    assert "own-pace" in registry
    assert "own-pace" in list(registry)
    assert registry.prefix("own-pace") == "own-pace."
    assert registry.options_type("own-pace").__name__ == "Parameters"
    assert "plugged:Mine" in registry.installed()
    with pytest.raises(UserError, match="Did you mean 'own-pace'"):
        registry.check("own-pase")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ("fedasync = plugged:Mine", "'fedasync', an entry point of package garden, has the name"),
        ("a.b = plugged:Mine", "may have letters, digits and hyphens in its name only"),
    ],
)
def test_a_package_may_not_take_a_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, entries: str, said: str
) -> None:
    install(folder, "garden", f"[raceme.strategies]\n{entries}\n", monkeypatch)
    # The error also comes before a run of Raceme's own method.
    with pytest.raises(UserError, match=said):
        strategies().check("fedasync")


def test_two_packages_may_not_share_a_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(folder, "garden", "[raceme.strategies]\nown = plugged:Mine\n", monkeypatch)
    install(folder, "meadow", "[raceme.strategies]\nown = plugged:Breaks\n", monkeypatch)
    with pytest.raises(UserError, match="has the name of another"):
        strategies().check("own")


def test_registries_are_compared_without_an_import() -> None:
    assert STRATEGIES != DATASETS
    assert {STRATEGIES: 1}[STRATEGIES] == 1


def test_a_function_that_returns_no_dataset_or_fleet_is_an_error(folder: Path) -> None:
    from raceme import datasets
    from raceme.simulation import fleet

    (folder / "broken.py").write_text("def three(*arguments):\n    return 3\n")
    with pytest.raises(UserError, match=r"'broken:three' must return .*Dataset, got int"):
        datasets.data_shape(RunConfig(dataset="broken:three", clients=2))
    with pytest.raises(UserError, match=r"'broken:three' must return a list of 2 Device"):
        fleet("broken:three", 2, 0)
    assert set(DEVICES) == {"uniform", "slow30x5", "slow30x10", "range1to5", "fdma", "churn"}


def test_summaries_are_read_from_the_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    assert summary_of("plugged:Mine") == "A method of one's own."
    assert summary_of("misspelt:f") == summary_of("absent.module:f") == ""
    assert "plugged" not in sys.modules


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Mine", "mine"),
        ("LatestMean", "latest-mean"),
        ("CASAPlus", "casa-plus"),
        ("my_method", "my-method"),
        ("FedAvgM", "fed-avg-m"),
        ("CA2FL", "ca2-fl"),
    ],
)
def test_keys_have_the_name_of_the_class_in_lower_case(name: str, key: str) -> None:
    assert kebab(name) == key


def test_all_keys_are_those_of_what_is_listed() -> None:
    assert "mine.speed" not in all_keys()


def test_only_modules_of_users_have_a_code_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "coded.py").write_text("from helping import rate\n")
    (tmp_path / "helping.py").write_text("rate = 1\n")
    (tmp_path / "unused.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    # Recorded fleets and Raceme's own functions do not count as a user's modules.
    none = {"devices": "trace:runs", "model": "raceme.training.models:cnn", "strategy": "casa"}
    assert code_of(none) == code_of({"dataset": "missing:data"}) == ""
    keys = {**none, "dataset": "coded:data"}
    found = code_of(keys)
    assert len(found) == 12
    (tmp_path / "unused.py").write_text("x = 1\n")
    assert code_of(keys) == found
    (tmp_path / "helping.py").write_text("rate = 2\n")
    assert code_of(keys) != found
