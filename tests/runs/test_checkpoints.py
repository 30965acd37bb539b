"""Checkpoints: a run continues after its process has ended, or is refused with a reason."""

import copy
import json
import logging
import math
import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clustered import centre_losses
from fleets import MODEL, grid_of, pulled_app
from forking import Commands
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import wait_until
from safetensors.numpy import load_file

from raceme.core import events
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.scheduling import RoundsParameters
from raceme.records.store import RunStore, read_events
from raceme.reporting.dashboard.source import RunSource
from raceme.reporting.run_page import read_summary
from raceme.runs.checkpoints import (
    CHECKPOINTS,
    Checkpointer,
    CheckpointFolder,
    DamagedError,
    _other_config,
    identity,
    read_tree,
    write_tree,
)
from raceme.runs.experiment import simulate
from raceme.simulation import Device, VirtualGrid
from raceme.strategies import STRATEGIES, Plan

SLOW = pytest.mark.slow

# Files.

ARRAYS = st.builds(
    lambda dtype, shape, seed: np.random.default_rng(seed).integers(0, 2, shape).astype(dtype),
    st.sampled_from([np.bool_, np.int32, np.int64, np.uint8, np.float32, np.float64]),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 99),
)
TEXTS = st.text(max_size=5) | st.sampled_from(["$array", "$$", "$bytes", "tree"])
TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | TEXTS
    | st.binary(max_size=9)
    | ARRAYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    """Equal in value and type, bit for bit."""
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray)
            and (a.dtype, a.shape) == (b.dtype, b.shape)
            and a.tobytes() == b.tobytes()
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@settings(max_examples=80)
@given(tree=TREES, note=st.dictionaries(st.sampled_from("abc"), TEXTS))
def test_written_checkpoints_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, tree: Any, note: dict[str, str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "trees" / "1.safetensors"
    write_tree(path, tree, note)
    read, read_note = read_tree(path)
    assert same(read, tree)
    assert read_note == note
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_repeated_arrays_are_written_once(tmp_path: Path) -> None:
    array, data = np.arange(10_000.0), bytes(50_000)
    tree = {"a": [array, array, array.reshape(100, 100)], "b": [data, data]}
    write_tree(tmp_path / "1", tree, {})
    assert (tmp_path / "1").stat().st_size < 2 * array.nbytes + len(data) + 1000
    read = read_tree(tmp_path / "1")[0]
    assert same(read, tree)
    assert read["b"][0] is read["b"][1]


def test_every_damage_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "1.safetensors"
    write_tree(path, {"x": np.arange(5), "n": [1, 2.5, "ü"]}, {"strategy": "casa"})
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(DamagedError):
            read_tree(path)
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedError):
            read_tree(path)


@pytest.mark.parametrize("value", [object(), {1: 2}, {1, 2}, np.float32(1)])
def test_other_objects_are_refused_and_nothing_is_left(value: object, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot keep"):
        write_tree(tmp_path / "1", [value], {})
    assert not list(tmp_path.iterdir())


# Every method, on a fleet with all kinds of events, resumed at any time.


def busy_fleet() -> VirtualGrid:
    rng = np.random.default_rng(5)
    targets = [3 * np.eye(8)[index % 2] + 0.1 * rng.normal(size=8) for index in range(7)]
    fleet = [
        Device(jitter=0.3, drop=0.1),
        Device(seconds_per_round=3.0, jitter=0.5),
        Device(mean_online=9.0, mean_offline=3.0),
        Device(online=((4.0, 11.0), (15.0, math.inf))),
        *[Device(jitter=0.2)] * 3,
    ]
    return grid_of(pulled_app(targets), fleet, seed=3)


def play(
    name: str, saved: dict[str, Any] | None = None, save_at: frozenset[int] = frozenset()
) -> tuple[list[events.Event], dict[int, bytes], dict[int, Any]]:
    """Run a method from a state or from the start; save its state at the given updates."""
    strategy, grid = STRATEGIES[name](seed=3), busy_fleet()
    if saved:
        strategy.load_state_dict(saved["strategy"])
        grid.load_state_dict(saved["grid"])
    seen: list[events.Event] = []
    states: dict[int, Any] = {}

    def stop_check() -> str:
        if strategy.progress.updates in save_at and strategy.progress.updates not in states:
            state = {"strategy": strategy.state_dict(), "grid": grid.state_dict()}
            states[strategy.progress.updates] = (state, len(seen))
        return ""

    plan = Plan(eval_every=7, concurrency=5)
    strategy.run(
        grid,
        MODEL,
        90,
        20.0,
        plan=plan,
        observe=seen.append,
        stop_check=stop_check,
        probe=centre_losses,
    )
    models = {k: model.vector.tobytes() for k, model in strategy.models.items()}
    return seen, models, states


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_a_run_that_goes_on_is_the_one_that_was_never_interrupted(
    name: str, tmp_path: Path
) -> None:
    seen, models, states = play(name, save_at=frozenset(range(0, 90)))
    # A round of FedRC has four updates per client.
    assert len(states) > (3 if name == "fedrc" else 8)
    happened = {type(event) for event in seen}
    assert events.UpdateRejected in happened
    # With rounds, a client may leave and come back between two of them, unnoticed.
    assert events.ClientLeft in happened or issubclass(
        STRATEGIES[name].parameters_type, RoundsParameters
    )
    rng = np.random.default_rng(1)
    for updates in [0, *rng.choice(sorted(states), 4)]:
        state, observed = states[updates]
        write_tree(tmp_path / "1", state, {})
        rest, rest_models, _ = play(name, saved=read_tree(tmp_path / "1")[0])
        # Compared as text, since NaN is not equal to itself.
        assert list(map(repr, rest)) == list(map(repr, seen[observed:]))
        assert rest_models == models


def arrays_of(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of arrays in a tree."""
    if isinstance(tree, np.ndarray):
        yield place
    elif isinstance(tree, dict | list):
        for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from arrays_of(inner, (*place, key))


@pytest.mark.parametrize("name", ["casa", "panicle", "flexcfl-async", "fedbuff"])
def test_arrays_of_wrong_shapes_end_in_one_line(name: str, tmp_path: Path) -> None:
    """One array of each kind is forged: the model, the bases of clients, judged updates."""
    keys = {"strategy": name, "dataset": "digits", "clients": 8, "workers": "0"}
    keys |= {"max-updates": 30, "checkpoint-every": 20, "protection": "filter"}
    keys |= {"out": str(tmp_path)}
    simulate(RunConfig.from_mapping(keys), lambda event: None)
    newest = max((tmp_path / CHECKPOINTS).iterdir())
    tree, note = read_tree(newest)
    places = list(arrays_of(tree["strategy"]))
    kinds = {place[: 3 if place[0] == "features" else 2]: place for place in places}
    directions = ("features", "protection", "directions")
    assert {("clusters", "models"), ("bases", "vectors"), directions} <= set(kinds)
    for kind, place in kinds.items():
        for forged in (np.zeros(3, np.float32), np.zeros((2, 5), np.float32)):
            shutil.rmtree(tmp_path / CHECKPOINTS)
            changed = copy.deepcopy(tree)
            inner = changed["strategy"]
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = forged.astype(inner[place[-1]].dtype)
            write_tree(newest, changed, note)
            resumed = RunConfig.from_mapping({**keys, "out": "", "resume": str(tmp_path)})
            reason = refusal(resumed)
            # Arrays that a method recomputes may have any shape.
            assert reason or kind[0] == "state"
            assert "\n" not in reason


def refusal(config: RunConfig) -> str:
    """Run, and return the reason of a refusal; empty if there was none."""
    try:
        simulate(config, lambda event: None)
    except UserError as error:
        return str(error)
    return ""


# Kills of the command line.

KEYS = ["--clients", "8", "--max-updates", "150", "--workers", "0"]
EVERY = ["--checkpoint-every", "10"]
RUNS = {
    "casa": ["--set", "casa.gamma=0.05"],
    "fedbuff": [],
    "fedavg": ["--set", "fedavg.fraction=0.6"],
}


CHURN = """
[device]
seconds-per-round = [1.0, 3.0]
jitter = 0.3
drop = 0.05
mean-online = 20.0
mean-offline = 3.0
"""


@pytest.fixture(scope="module")
def churn(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("profile") / "churn.toml"
    path.write_text(CHURN)
    return str(path)


def arguments(name: str, churn: str, out: Path) -> list[str]:
    keys = ["--strategy", name, "--devices", churn, "--out", str(out), "--set", "task-timeout=20"]
    return ["run", *KEYS, *keys, *RUNS[name]]


@pytest.fixture(scope="module")
def whole(
    command: Commands, churn: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Uninterrupted runs."""
    base = tmp_path_factory.mktemp("whole")
    for name in RUNS:
        code = command.run(*arguments(name, churn, base / name), output=base / "log")
        assert code == 0, (base / "log").read_text()
    return {name: base / name for name in RUNS}


def result_of(out: Path) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Return all results of a run except wall-clock times."""
    with sqlite3.connect(out / "run.sqlite") as connection:
        dump = list(connection.iterdump())
    models = {
        path.name: {name: array.tobytes() for name, array in load_file(path).items()}
        for path in (out / "clusters").iterdir()
    }
    summary = json.loads((out / "summary.json").read_text())
    del summary["wall_time"], summary["updates_per_second"]
    return dump, models, summary


def kill_and_resume(command: Commands, started: list[str], out: Path, seed: int) -> None:
    """Kill a run at a random moment after its first checkpoint, and resume it."""
    rng = np.random.default_rng(seed)
    wanted, log = int(rng.integers(1, 15)), out.with_suffix(".log")
    child = command.start(*started, *EVERY, output=log)
    first = out / "checkpoint" / f"{wanted:08d}.safetensors"
    wait_until(lambda: first.exists() or not Path(f"/proc/{child}").exists(), 60)
    time.sleep(rng.uniform(0.0, 0.1))
    os.kill(child, signal.SIGKILL)
    assert command.exit_code() == -signal.SIGKILL, log.read_text()
    assert not (out / "summary.json").exists()
    assert command.run("run", "--resume", str(out), output=log) == 0, log.read_text()
    assert "Resuming from" in log.read_text()


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=SLOW) for n in range(2, 20))])
def test_a_killed_run_ends_bit_for_bit_as_if_nothing_had_been(
    seed: int, command: Commands, churn: str, whole: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    kill_and_resume(command, arguments("casa", churn, out), out, seed)
    assert result_of(tmp_path / "out") == result_of(whole["casa"])


@pytest.mark.parametrize("name", ["fedbuff", "fedavg"])
def test_a_killed_run_of_another_method_ends_bit_for_bit(
    name: str, command: Commands, churn: str, whole: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    kill_and_resume(command, arguments(name, churn, out), out, seed=1)
    assert result_of(tmp_path / "out") == result_of(whole[name])


def test_a_run_that_is_told_to_stop_leaves_a_checkpoint(
    command: Commands, churn: str, whole: dict[str, Path], tmp_path: Path
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    # Checkpoints by number or time are off: only the signal causes one.
    child = command.start(*arguments("casa", churn, out), output=log)
    wait_until(lambda: "evaluated at 8 " in log.read_text(), 60)
    os.kill(child, signal.SIGTERM)
    assert command.exit_code() == 130
    stopped = json.loads((out / "summary.json").read_text())
    assert stopped["reason"] == "interrupted by SIGTERM"
    assert 8 <= stopped["updates"] < 150
    assert [path.name for path in (out / "checkpoint").iterdir()] == ["00000001.safetensors"]
    assert command.run("run", "--resume", str(out), output=log) == 0, log.read_text()
    assert result_of(out) == result_of(whole["casa"])


class Walled(VirtualGrid):
    """A grid that claims to have real devices."""

    is_virtual = False


class Slow(CheckpointFolder):
    """A folder on a slow disk, with the clock of a test."""

    now, cost = 0.0, 0.0

    def save(self, tree: Any, note: Mapping[str, str]) -> Path:
        self.now += self.cost
        return super().save(tree, note)


def test_checkpoints_of_real_devices_take_two_percent_of_the_time(tmp_path: Path) -> None:
    config = RunConfig.from_mapping({"strategy": "fedasync"})
    strategy, folder = STRATEGIES["fedasync"](), Slow(tmp_path)
    grid = Walled(pulled_app(), [])
    with RunStore(tmp_path) as store:
        checkpointer = Checkpointer(
            folder,
            config,
            strategy,
            grid,
            store,
            wall_time=lambda: folder.now,
            stop=lambda: "",
            resumed=False,
        )

        def written_at(time: float) -> bool:
            folder.now, before = time, sorted((tmp_path / CHECKPOINTS).glob("*"))
            checkpointer.stop_check()
            return sorted((tmp_path / CHECKPOINTS).glob("*")) != before

        folder.cost = 4.0
        assert written_at(0.0)
        # The write ended at 4 s and took 4 s: the next
        # follows after 50 times that, and takes no time.
        assert not written_at(203.0)
        folder.cost = 0.0
        assert written_at(204.0)
        # The pause is at least 10 s.
        assert not written_at(213.0)
        assert written_at(214.0)


# Runs that cannot be resumed.

SMALL = {
    "clients": 3,
    "groups": "0.5,0.5",
    "max-updates": 12,
    "workers": "0",
    "checkpoint-every": 4,
    "eval-every": 6,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "out"
    simulate(RunConfig.from_mapping({**SMALL, "out": str(out)}))
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "out"))


def go_on(folder: Path, keys: dict[str, Any] | None = None) -> dict[str, Any]:
    mapping = {**SMALL, "resume": str(folder), **(keys or {})}
    return simulate(RunConfig.from_mapping(mapping)).summary


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoint").iterdir())


def test_the_last_two_are_kept_and_a_finished_run_can_be_made_longer(
    out: Path, tmp_path: Path
) -> None:
    # Checkpoints at 0, 4 and 8 updates, and at the end, 12.
    assert checkpoints(out) == ["00000002.safetensors", "00000003.safetensors"]
    summary = go_on(out, {"max-updates": 20})
    straight = simulate(
        RunConfig.from_mapping({**SMALL, "max-updates": 20, "out": str(tmp_path / "straight")})
    ).summary
    assert summary["updates"] == 20
    assert summary["accuracy"] == straight["accuracy"]
    assert result_of(out)[:2] == result_of(tmp_path / "straight")[:2]
    assert "max-updates = 20" in (out / "config.toml").read_text()


def test_observers_of_a_resumed_run_do_not_get_its_former_end(out: Path) -> None:
    before, source, said = RunSource(out), RunSource(out), []
    before.read_all()
    assert any('"summary":{' in piece for piece in before.pieces)

    def look(event: events.Event) -> None:
        if isinstance(event, events.UpdateApplied) and not said:
            before.read_all()
            source.read_all()
            with pytest.raises(UserError, match=r"no summary.json: the run is in progress\.$"):
                read_summary(out)
            said.append(before.pieces[-1])

    keys = {**SMALL, "resume": str(out), "max-updates": 20}
    simulate(RunConfig.from_mapping(keys), look)
    assert said
    # An open page gets the new summary, or is told that there is none any more.
    told = [piece for piece in before.pieces if '"summary"' in piece]
    assert not told or told[-1] == '{"summary":null}'
    assert not any('"summary"' in piece for piece in source.pieces)


def test_a_damaged_checkpoint_is_passed_over_and_that_is_reported(
    out: Path, finished: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = out / "checkpoint" / "00000003.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    logging.getLogger("raceme").propagate = True
    go_on(out)
    assert "00000003.safetensors cannot be used: it is damaged" in caplog.text
    assert "Using the previous one: 00000002.safetensors" in caplog.text
    assert result_of(out) == result_of(finished)
    assert checkpoints(out) == ["00000002.safetensors", "00000004.safetensors"]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"strategy": "fedbuff"}, "strategy is 'casa' there and 'fedbuff' here"),
        ({"lr": 0.25}, "to another run: lr is [0-9.]+ there and 0.25 here[.]"),
        ({"clients": 4, "seed": 9}, "clients is 3 there and 4 here; seed is 0 there and 9 here"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    keys: dict[str, Any], reason: str, out: Path, finished: Path
) -> None:
    with pytest.raises(UserError, match=reason):
        go_on(out, keys)
    assert result_of(out) == result_of(finished)


def test_a_key_that_is_newer_than_the_checkpoint_had_its_default() -> None:
    here = identity(RunConfig.from_mapping({"strategy": "casa", "casa.gamma": 0.2}))
    there = {key: here[key] for key in here.keys() - {"seed", "casa.patience"}}
    assert not _other_config(there, here)
    changed = {**here, "casa.patience": 7.0}
    assert "patience is 10.0 there and 7.0 here" in _other_config(there, changed)
    assert "gamma is" in _other_config({**there, "casa.gamma": 0.3}, here)
    assert "gone is 1 there and None here" in _other_config({**there, "gone": 1}, here)


def test_without_any_usable_checkpoint_the_run_is_left_alone(out: Path, finished: Path) -> None:
    for path in (out / "checkpoint").iterdir():
        path.write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"it is damaged .* There is no other to resume from"):
        go_on(out)
    assert result_of(out) == result_of(finished)


def test_a_run_without_checkpoints_starts_again_and_can_be_made_longer(
    out: Path, finished: Path, tmp_path: Path
) -> None:
    shutil.rmtree(out / "checkpoint")
    with pytest.raises(
        UserError, match=r"cannot be resumed: it belongs to another run: lr is 0\.2 there"
    ):
        go_on(out, {"lr": 0.3})
    assert result_of(out) == result_of(finished)
    straight = tmp_path / "straight"
    simulate(RunConfig.from_mapping({**SMALL, "max-updates": 20, "out": str(straight)}))
    go_on(out, {"max-updates": 20})
    assert result_of(out) == result_of(straight)
    assert (out / "positions.jsonl").read_text() == (straight / "positions.jsonl").read_text()


def test_a_run_of_real_devices_is_no_simulation(out: Path) -> None:
    # A simulation has a limit, and no list of device keys.
    for keys in ({"max-updates": 0}, {"device-keys": str(out)}):
        with pytest.raises(UserError, match="is a run of real devices: resume it with `raceme ser"):
            go_on(out, keys)


def test_the_folder_has_to_be_that_of_the_run(out: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There is no run in .*elsewhere to resume"):
        go_on(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="A run resumes in its own folder"):
        go_on(out, {"out": str(tmp_path / "new")})


def test_a_run_store_of_another_run_is_refused(out: Path, tmp_path: Path) -> None:
    models = sorted((out / "clusters").iterdir())
    (out / "run.sqlite").unlink()
    with RunStore(out) as store:
        store.observe(events.ClientLeft(1.0, "c0"))
    with pytest.raises(UserError, match="is not of the same run as its checkpoint"):
        go_on(out)
    assert read_events(out) == [events.ClientLeft(1.0, "c0")]
    assert sorted((out / "clusters").iterdir()) == models


def test_a_run_store_goes_on_after_an_event_and_forgets_what_came_later(tmp_path: Path) -> None:
    written: list[events.Event] = [
        events.ClientJoined(0.0, "a", 0, 5, None),
        events.Evaluated(1.0, 0, 0.5, 1.0, 1, {"a": (0, 0.5, 1.0)}),
        events.ClustersChanged(
            2.0, 0, events.ClusterChange.SPLIT, {"a": {1: 1.0}}, (0,), (1,), 0.5, 0.25
        ),
        events.ClientLeft(3.0, "a"),
        events.RunEnded(3.0, 0, "done"),
    ]
    with RunStore(tmp_path) as store:
        for event in written:
            store.observe(event)
        assert store.commit() == 5
    with RunStore(tmp_path, after=3) as store:
        store.observe(events.ClientLeft(9.0, "a"))
        assert store.commit() == 4
    assert read_events(tmp_path) == [*written[:3], events.ClientLeft(9.0, "a")]
