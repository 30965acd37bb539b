"""Imports of commands and names: no more than needed. Counted in separate processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest
import typer
from processes import ROOT

from raceme.cli import COMMANDS
from raceme.core.registry import (
    ATTACKS,
    DATASETS,
    DEVICES,
    DRIFTS,
    FEATURES,
    MODELS,
    PARTITIONERS,
    PROTECTIONS,
    STRATEGIES,
    Registry,
    docstring_of,
)

HEAVY = {"flwr", "matplotlib", "numpy", "pandas", "scipy", "sklearn", "sqlalchemy", "torch"}
REGISTRIES = [STRATEGIES, DATASETS, PARTITIONERS, DRIFTS, FEATURES, PROTECTIONS, ATTACKS, MODELS]


def imported(code: str, folder: Path) -> set[str]:
    """Return the modules that a process has imported when it ends, with or without an error."""
    told = "import atexit\natexit.register(lambda: print('IMPORTED', *sorted(sys.modules)))\n"
    lines = [line for line in output_of(told + code, folder) if line.startswith("IMPORTED ")]
    return set(lines[-1].split()[1:])


def output_of(code: str, folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}"],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.stdout.splitlines()


def command(*arguments: str) -> str:
    return f"sys.argv = {['raceme', *arguments]!r}\nfrom raceme.cli import main\nmain()"


def imported_by(commands: Sequence[tuple[str, ...]], folder: Path) -> dict[str, set[str]]:
    """Return the modules that one process has imported after each of several commands."""
    code = f"""
from raceme.cli import main
for arguments in {list(commands)!r}:
    sys.argv = ["raceme", *arguments]
    try:
        main()
    except SystemExit:
        pass
    print("\\nAFTER", *sorted(sys.modules))
"""
    found = [line for line in output_of(code, folder) if line.startswith("AFTER ")]
    return dict(zip(map(" ".join, commands), (set(line.split()) for line in found), strict=True))


def test_help_lists_and_mistyped_names_need_none_of_what_a_run_needs(tmp_path: Path) -> None:
    commands = [
        ("--help",),
        ("list",),
        ("run", "--strategy", "fedasinc"),
        ("run", "--dataset", "minst"),
        ("run", "--model", "cnnn"),
        ("run", "--devices", "slow30"),
        ("compare", "fedasinc"),
        ("rnu",),
    ]
    for line, found in imported_by(commands, tmp_path).items():
        assert not {name.partition(".")[0] for name in found} & HEAVY, line
        rooms = {name.split(".")[1] for name in found if name.startswith("raceme.")}
        assert rooms <= {"cli", "core", "features"}, line


def test_a_mistyped_key_needs_no_scikit_learn_and_no_torch(tmp_path: Path) -> None:
    keys = ["casa.gama", "panicle.levle"]
    commands = [("run", "--strategy", "fedasync", "--set", f"{key}=1") for key in keys]
    for key, found in zip(keys, imported_by(commands, tmp_path).values(), strict=True):
        assert f"raceme.strategies.{key.partition('.')[0]}" in found
        assert not {name.partition(".")[0] for name in found} & {"sklearn", "scipy", "torch"}, key


def test_mistyped_commands_need_no_torch(tmp_path: Path) -> None:
    device = ("device", "--superlink", "127.0.0.1:1")
    commands = [
        (*device, "--insecure", "--node-config", "data-file='missing.npz'"),
        (*device, "--key", "missing"),
        (*device, "--insecure", "--when", "soon"),
        ("serve",),
        ("serve", "--out", "run", "--certificates", "missing"),
        ("serve", "--out", "run", "--metrics", "nowhere"),
        ("fleet", "status", "nowhere"),
        ("certs", "--out", "certs"),
        ("compare", "casa", "--budget", "time=soon"),
        ("compare", "casa", "--seeds", "5..2"),
        ("run", "--seeds", "3"),
        ("run", "--attackers", "0.3"),
    ]
    for line, found in imported_by(commands, tmp_path).items():
        assert "torch" not in found, line


def test_jobs_of_a_comparison_are_imported_without_ray(tmp_path: Path) -> None:
    found = imported("import raceme.experiments.jobs", tmp_path)
    assert not {name.partition(".")[0] for name in found} & {"ray", "torch"}
    assert "raceme.simulation.ray_cluster" not in found


def test_the_help_of_all_commands_imports_none_of_them(tmp_path: Path) -> None:
    modules = {target.partition(":")[0] for target in COMMANDS.values()}
    assert not imported(command("--help"), tmp_path) & modules


def test_a_method_is_imported_without_any_other(tmp_path: Path) -> None:
    code = "from raceme.core.registry import STRATEGIES\nSTRATEGIES['fedasync']"
    found = imported(code, tmp_path)
    own = {name for name in found if name.startswith("raceme.strategies.")}
    assert own == {"raceme.strategies.fedasync", "raceme.strategies.shared"}
    assert not {"scipy", "sklearn", "torch", "matplotlib", "sqlalchemy"} & found
    rooms = {name.split(".")[1] for name in found if name.startswith("raceme.")}
    assert rooms == {"core", "flower", "strategies"}


def test_the_package_imports_nothing_of_itself(tmp_path: Path) -> None:
    found = imported("import raceme", tmp_path)
    assert {name for name in found if name.startswith("raceme.")} == set()


def test_a_run_draws_and_groups_nothing_before_its_first_update(tmp_path: Path) -> None:
    code = """
from raceme.core.config import RunConfig
from raceme.core.events import UpdateApplied
from raceme.runs.experiment import simulate

def seen(event):
    if isinstance(event, UpdateApplied):
        raise SystemExit

keys = {"strategy": "fedasync", "workers": 0, "clients": 4, "out": "out"}
simulate(RunConfig.from_mapping(keys), seen)
"""
    found = imported(code, tmp_path)
    assert "torch" in found
    assert not {"matplotlib", "scipy", "sklearn", "pandas", "sqlalchemy", "fastapi"} & found


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.kind)
def test_summaries_are_those_of_the_objects(registry: Registry) -> None:
    summaries = registry.summaries()
    for name in registry:
        lines = (registry[name].__doc__ or "").strip().splitlines()
        assert summaries[name] == (lines[0] if lines else ""), name


def test_commands_have_the_docstrings_of_their_functions() -> None:
    for target in COMMANDS.values():
        module, name = target.split(":")
        found = getattr(import_module(module), name)
        text = found.info.help if isinstance(found, typer.Typer) else found.__doc__
        assert docstring_of(target).split() == text.split()


def test_device_profiles_describe_themselves() -> None:
    assert all(DEVICES.summaries().values())


def test_a_whole_run_of_fedasync_with_its_maps_needs_no_scipy(tmp_path: Path) -> None:
    arguments = ("run", "--strategy", "fedasync", "--clients", "8", "--max-updates", "40")
    found = imported(command(*arguments, "--workers", "0", "--out", "run"), tmp_path)
    assert (tmp_path / "run" / "positions.jsonl").read_text().count("\n") > 1
    assert "matplotlib" in found
    assert not found & {"scipy", "sklearn", "pandas"}
