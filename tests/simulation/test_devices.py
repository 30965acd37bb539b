"""Devices: profiles, durations, uplinks and recorded runs."""

from __future__ import annotations

import copy
import math
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict

from raceme.core import events
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.registry import DEVICES
from raceme.records.record import RunRecord, read_run
from raceme.records.store import RunStore, read_events
from raceme.runs.experiment import simulate
from raceme.simulation import Device, fleet
from raceme.simulation.devices import (
    DROPPED,
    TOO_SLOW,
    DeviceModel,
    ReplayedTask,
    TaskOutcome,
    TracedDevice,
    Uplink,
    Workload,
    bytes_of,
    path_loss,
    traced_fleet,
)


def profile(folder: Path, text: str) -> str:
    """Write a profile and return its path."""
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def speeds(devices: list[Device]) -> Counter[float]:
    return Counter(device.seconds_per_round for device in devices)


# The built-in ones.


def test_the_built_in_profiles_have_one_line_of_description_each() -> None:
    assert set(DEVICES) == {*("uniform", "slow30x5", "slow30x10", "range1to5", "fdma", "churn")}
    assert all(text and "\n" not in text for text in DEVICES.summaries().values())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("uniform", {1.0: 40}),
        ("slow30x5", {1.0: 28, 5.0: 12}),
        ("slow30x10", {1.0: 28, 10.0: 12}),
    ],
)
def test_shares_are_exact(name: str, expected: dict[float, int]) -> None:
    for seed in range(5):
        assert speeds(fleet(name, 40, seed)) == expected


def test_a_range_gives_every_device_its_own_speed() -> None:
    drawn = [device.seconds_per_round for device in fleet("range1to5", 200, 0)]
    assert min(drawn) >= 1.0
    assert max(drawn) <= 5.0
    assert np.mean(drawn) == pytest.approx(3.0, abs=0.3)
    assert len(set(drawn)) == 200


@pytest.mark.parametrize("name", ["slow30x5", "range1to5"])
def test_the_seed_decides_who_is_slow(name: str) -> None:
    assert fleet(name, 40, 1) == fleet(name, 40, 1)
    assert fleet(name, 40, 1) != fleet(name, 40, 2)


def test_fleets_and_durations_are_those_of_earlier_versions() -> None:
    # Recorded with an earlier version: results must stay reproducible.
    expected = {
        "slow30x5": [1.0023643249400513, 5.450463696325936, 0.9288319225439268],
        "range1to5": [3.1199108577208596, 3.678939969121946, 2.898432863318956],
    }
    for name, durations in expected.items():
        rng = np.random.default_rng(1)
        devices = fleet(name, 6, 3)
        assert [d.duration(Workload(10, 1000, 1000, examples=62), rng) for d in devices][
            :3
        ] == durations
        assert rng.uniform() == 0.8277025938204418


# The latency of CSAFL.


def test_the_random_part_is_a_shifted_exponential() -> None:
    # D = 62 examples times 10 epochs; shift a D = 0.62 s; mean of the rest D / μ = 0.31 s.
    device = Device(seconds_per_round=0.0, seconds_per_sample=0.001, exponential_rate=2000.0)
    rng = np.random.default_rng(0)
    load = Workload(epochs=10, examples=62)
    times = np.array([device.duration(load, rng) for _ in range(20_000)])
    assert times.min() > 0.62
    assert times.mean() == pytest.approx(0.93, abs=0.01)
    assert device.mean_duration(load) == pytest.approx(0.93)
    for share in (0.1, 0.5, 0.9, 0.99):
        # P[T <= t] = 1 - exp(-(μ/D)(t - aD)), solved for t.
        quantile = 0.62 - math.log(1.0 - share) * 0.31
        assert np.mean(times <= quantile) == pytest.approx(share, abs=0.01)


def test_the_mean_duration_by_hand() -> None:
    device = Device(
        seconds_per_round=2.0,
        seconds_per_sample=0.01,
        exponential_rate=50.0,
        bandwidth_down=1000.0,
        bandwidth_up=500.0,
        jitter=0.5,
    )
    # Half of 2 + 0.01 · 200 + 200 / 50, then 2 s down and 6 s up.
    load = Workload(2, 2000, 3000, scale=0.5, examples=100)
    assert device.mean_duration(load) == 4.0 + 2.0 + 6.0
    rng = np.random.default_rng(0)
    times = [device.duration(load, rng) for _ in range(20_000)]
    assert np.mean(times) == pytest.approx(12.0, abs=0.05)
    assert Device().mean_duration(load._replace(scale=1.0)) == 1.0


def test_work_without_samples_has_no_random_part() -> None:
    device = Device(seconds_per_round=3.0, exponential_rate=10.0)
    assert device.duration(Workload(epochs=5, examples=0), np.random.default_rng(0)) == 3.0


def test_a_radio_uplink_becomes_a_bandwidth(tmp_path: Path) -> None:
    text = """
        [device]
        uplink-hz = 8e5
        transmit-dbm = 14.1
        distance-km = 1.0
        noise-dbm = -114.0
        [[group]]
        clients = [1]
        distance-km = [1.5, 2.0]
    """
    near, far, other = fleet(profile(tmp_path, text), 3, 0)
    # 14.1 - 128.1 + 114 = 0 dB: 8e5 bit/s.
    assert near.bandwidth_up == pytest.approx(1e5)
    assert near == other
    assert 0 < far.bandwidth_up < 5e4
    assert near.bandwidth_down == 0.0


def test_an_update_of_the_papers_budgets_takes_seconds_on_fdma() -> None:
    # A client of the papers' MNIST: 62 training samples, 10 epochs, 7,850 weights of 4 bytes.
    devices = fleet("fdma", 1000, 0)
    load = Workload(10, 31_400, 31_400, examples=62)
    means = np.array([device.mean_duration(load) for device in devices])
    assert 0.3 < means.min() < 0.5 < 5.0 < means.max() < 10.0
    assert 1.0 < np.median(means) < 2.0
    # Stragglers: one client in a hundred takes more than three times the median.
    assert np.quantile(means, 0.99) > 3 * np.median(means)
    up = np.array([31_400 / device.bandwidth_up for device in devices])
    assert 0.1 < np.median(up) < 0.4 < 3.0 < up.max()


# A user's own profiles.


def test_groups_are_laid_over_what_is_common(tmp_path: Path) -> None:
    text = """
        description = "two named ones, and half of all with a weak line"
        [device]
        seconds-per-round = 2
        bandwidth-down = 1e6
        [[group]]
        share = 0.5
        bandwidth-down = 1000.0
        [[group]]
        clients = [0, 3, 99]
        seconds-per-round = 9.0
        online = [[0, 10], [20, inf]]
    """
    devices = fleet(profile(tmp_path, text), 10, 0)
    assert Counter(device.bandwidth_down for device in devices) == {1000.0: 5, 1e6: 5}
    assert [index for index, d in enumerate(devices) if d.seconds_per_round == 9.0] == [0, 3]
    assert devices[3].online == ((0.0, 10.0), (20.0, float("inf")))
    assert devices[1].online == ()


def test_shares_do_not_overlap_and_may_add_up_to_everybody(tmp_path: Path) -> None:
    text = "".join(
        f"[[group]]\nshare = {share}\nseconds-per-round = {seconds}\n"
        for share, seconds in ((0.1, 3), (0.2, 4), (0.7, 5))
    )
    assert speeds(fleet(profile(tmp_path, text), 10, 0)) == {3.0: 1, 4.0: 2, 5.0: 7}


@pytest.mark.parametrize(
    ("shares", "clients", "expected"),
    [
        # 2.5 and 2.5: one client remains, and at a tie the earlier group gets it.
        ((0.5, 0.5), 5, (3, 2, 0)),
        # 1.665 each and 0.005 without a group: two remain for the three fractions of 0.665.
        ((0.333, 0.333, 0.333), 5, (2, 2, 1, 0)),
        # 1.2 and 1.2, 1.6 without a group: the largest fraction is that of clients without one.
        ((0.3, 0.3), 4, (1, 1, 2)),
        # 0.2, 0.2, 0.2 and 1.4: the remaining client has no group, as most of them.
        ((0.1, 0.1, 0.1), 2, (0, 0, 0, 2)),
        ((0.29,), 100, (29, 71)),
        ((0.3,), 0, (0, 0)),
        ((1.0, 0.0), 7, (7, 0, 0)),
    ],
)
def test_shares_are_rounded_together(
    tmp_path: Path, shares: tuple[float, ...], clients: int, expected: tuple[int, ...]
) -> None:
    text = "[device]\nseconds-per-round = 99\n" + "".join(
        f"[[group]]\nshare = {share}\nseconds-per-round = {index}\n"
        for index, share in enumerate(shares)
    )
    found = speeds(fleet(profile(tmp_path, text), clients, 0))
    assert tuple(found[group] for group in (*range(len(shares)), 99)) == expected


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.7])
def test_a_single_share_is_rounded_to_the_nearest(tmp_path: Path, share: float) -> None:
    path = profile(tmp_path, f"[[group]]\nshare = {share}\nseconds-per-round = 7.0")
    for clients in range(1, 60):
        count = speeds(fleet(path, clients, 0))[7.0]
        assert abs(count - share * clients) < 0.501


def test_an_empty_profile_is_a_fleet_of_default_devices(tmp_path: Path) -> None:
    assert fleet(profile(tmp_path, ""), 2, 0) == [Device(), Device()]


# Availability.


def test_set_periods_switch_at_their_ends() -> None:
    device = Device(online=((0, 5), (7, float("inf"))))
    assert device.starts_online()
    assert list(device.switches(np.random.default_rng(0))) == [5, 7]
    late = Device(online=((2, 5),))
    assert not late.starts_online()
    assert list(late.switches(np.random.default_rng(0))) == [2, 5]
    assert list(Device().switches(np.random.default_rng(0))) == []


def test_random_periods_have_their_means() -> None:
    device = Device(mean_online=9.0, mean_offline=3.0)
    times = [0.0, *islice(device.switches(np.random.default_rng(0)), 20_000)]
    lengths = np.diff(times)
    assert lengths.min() > 0
    assert lengths[0::2].mean() == pytest.approx(9.0, rel=0.05)
    assert lengths[1::2].mean() == pytest.approx(3.0, rel=0.05)


def test_jitter_takes_one_number_whether_it_is_used_or_not() -> None:
    for device in (Device(), Device(jitter=0.5)):
        rng = np.random.default_rng(7)
        device.duration(Workload(1, 100, 100, examples=10), rng)
        assert rng.uniform() == np.random.default_rng(7).uniform(size=2)[1]


# A device over time.


LOAD = Workload(epochs=1, bytes_down=0, bytes_up=0, scale=1.0)


def model_of(device: Device) -> DeviceModel:
    return DeviceModel(device, examples=10, entropy=(3,))


def test_jitter_is_as_often_faster_as_slower() -> None:
    model = model_of(Device(seconds_per_round=10.0, jitter=0.2))
    ends = [model.begin(LOAD, 0.0, np.inf).due for _ in range(2000)]
    durations = np.diff(ends)
    assert 8.0 <= durations.min() < 8.1
    assert 11.9 < durations.max() <= 12.0
    assert durations.mean() == pytest.approx(10.0, abs=0.1)


def test_tasks_queue_on_a_device_until_it_stops() -> None:
    model = model_of(Device(seconds_per_round=2.0))
    assert [model.begin(LOAD, 1.0, 9.0).due for _ in range(2)] == [3.0, 5.0]
    model.stop()
    assert model.begin(LOAD, 1.5, 9.0).due == 3.5


def test_a_task_that_ends_too_late_is_lost_when_it_expires_and_keeps_the_device_busy() -> None:
    model = model_of(Device(seconds_per_round=2.0))
    assert model.begin(LOAD, 0.0, 1.5) == TaskOutcome(1.5, TOO_SLOW)
    assert model.begin(LOAD, 1.5, 9.0) == TaskOutcome(4.0, None)


def test_a_dropped_task_takes_its_time_on_the_device_too() -> None:
    model = model_of(Device(seconds_per_round=2.0, drop=0.5))
    outcomes = [model.begin(LOAD, 0.0, 1e9) for _ in range(400)]
    for number, (due, lost) in enumerate(outcomes, start=1):
        assert (due, lost) in [(2.0 * number, None), (1e9, DROPPED)]
    assert sum(lost is not None for _, lost in outcomes) == pytest.approx(200, abs=40)


def test_a_saved_device_continues_as_if_it_had_not_been_saved() -> None:
    device = Device(jitter=0.5, drop=0.2, mean_online=5.0, mean_offline=2.0)
    model, restored = model_of(device), model_of(device)
    for _ in range(5):
        model.begin(LOAD, 0.0, 100.0)
        model.next_switch()
    restored.load_state_dict(copy.deepcopy(model.state_dict()))
    assert restored.next_switch() == model.next_switch()
    for _ in range(5):
        assert restored.begin(LOAD, 1.0, 100.0) == model.begin(LOAD, 1.0, 100.0)


# Errors.


def test_an_unknown_profile_is_met_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"Unknown device profile 'slow30x6'.*Did you mean 'slow30"):
        fleet("slow30x6", 4, 0)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UserError, match=r"Cannot read .*nowhere/a.toml: No such file"):
        fleet("nowhere/a.toml", 4, 0)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="it is no text in UTF-8"):
        fleet(str(path), 4, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seconds = [", "not valid TOML"),
        ("[devcie]", r"Unknown key .*'devcie'. Did you mean 'device'"),
        ("[device]\nsecond-per-round = 1", "Did you mean 'seconds-per-round'"),
        ("[[group]]\nshare = 0.1\njiter = 1", "Did you mean 'jitter'"),
        ("[[group]]\nshare = 0.0\njitter = 'x'", "jitter must be a number"),
        ("device = 3", "device must be a table"),
        ("group = 3", r"written as \[\[group\]\]"),
        ("[group]\nshare = 0.1", r"written as \[\[group\]\]"),
        ("group = [1]", r"written as \[\[group\]\]"),
        ("[[group]]\njitter = 0.1", "either share or clients"),
        ("[[group]]\nshare = 0.1\nclients = [0]", "either share or clients"),
        ("[[group]]\nshare = 'many'", "share must be a number"),
        ("[[group]]\nshare = true", "share must be a number"),
        ("[[group]]\nshare = 1.2", "between 0 and 1"),
        ("[[group]]\nshare = -0.2", "between 0 and 1"),
        ("[[group]]\nshare = nan", "between 0 and 1"),
        ("[[group]]\nshare = 0.6\n[[group]]\nshare = 0.5", "must sum to at most 1, got 1.1"),
        ("[[group]]\nclients = 3", "clients takes a list"),
        ("[[group]]\nclients = [-1]", "clients takes a list"),
        ("[[group]]\nclients = ['a']", "clients takes a list"),
        ("[[group]]\nclients = [1.5]", "clients takes a list"),
        ("[device]\nseconds-per-round = -1", "seconds-per-round must be a number of at least 0"),
        ("[device]\nseconds-per-round = nan", "seconds-per-round must be a number of at least 0"),
        ("[device]\nbandwidth-up = inf", "bandwidth-up must be a number of at least 0"),
        ("[device]\nseconds-per-round = 'slow'", "seconds-per-round must be a number"),
        ("[device]\nseconds-per-round = [1]", r"takes \[low, high\]"),
        ("[device]\nseconds-per-round = [5, 1]", r"takes \[low, high\]"),
        ("[device]\nseconds-per-round = [1, 'x']", "must be a number"),
        ("[device]\njitter = 1.5", "between 0 and 1"),
        ("[device]\nexponential-rate = -1", "exponential-rate must be a number of at least 0"),
        ("[device]\nuplink-hz = 1e6", "either bandwidth-up or all of uplink-hz, transmit-dbm"),
        ("[device]\nbandwidth-up = 9\nuplink-hz = 1e6", "either bandwidth-up or all of uplink"),
        (
            "[device]\nuplink-hz=1e6\ntransmit-dbm=9\ndistance-km=0\nnoise-dbm=-100",
            "distance-km must be greater than 0",
        ),
        ("[device]\ndrop = 2", "between 0 and 1"),
        ("[device]\nmean-online = 2", "must be given together"),
        ("[device]\nonline = 3", r"online takes \[\[from, to\]"),
        ("[device]\nonline = [3, 4]", r"online takes \[\[from, to\]"),
        ("[device]\nonline = ['ab']", r"online takes \[\[from, to\]"),
        ("[device]\nonline = [[1, 'x']]", "online must be a number"),
        ("[device]\nonline = [[5, 3]]", "must be in order"),
        ("[device]\nonline = [[3, 3]]", "must be in order"),
        ("[device]\nonline = [[-1, 3]]", "must be in order"),
        ("[device]\nonline = [[0, 5], [4, 8]]", "must be in order"),
        ("[device]\nonline = [[0, nan]]", "must be in order"),
        ("[device]\nonline = [[0, inf], [inf, inf]]", "must be in order"),
    ],
)
def test_mistakes_in_a_profile_are_explained(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fleet(profile(tmp_path, text), 4, 0)


def test_a_short_task_takes_a_share_of_what_any_task_takes() -> None:
    device = Device(seconds_per_round=2.0, seconds_per_sample=0.01)
    # A quarter of 2 s, and a quarter of the passes: 100 samples half once.
    load = Workload(epochs=0.5, examples=100, share=0.25)
    time = device.duration(load, np.random.default_rng(0))
    assert time == pytest.approx(0.5 + 0.5)


# Sizes of messages.


def test_the_size_of_settings_is_flowers_and_empty_ones_weigh_their_names() -> None:
    filled = ConfigRecord(
        {
            "text": "abc",
            "raw": b"ab",
            "flag": True,
            "n": 3,
            "flags": [True, False],
            "ns": [1.0, 2.0],
        }
    )
    assert bytes_of(RecordDict({"config": filled})) == filled.count_bytes()
    # Flower's own count raises an error for each of these.
    empty = ConfigRecord({"text": "", "raw": b"", "list": [], "texts": [""]})
    assert bytes_of(RecordDict({"config": empty})) == len("textrawlisttexts")


# Traces: the times of an earlier run, replayed on virtual time.


CHURN = """
[device]
seconds-per-round = [1.0, 4.0]
jitter = 0.4
drop = 0.1

[[group]]
clients = [1]
online = [[2.5, 9.0], [12.0, 1000.0]]

[[group]]
clients = [2]
mean-online = 15.0
mean-offline = 2.0
"""
KEYS = {"clients": 5, "groups": "0.5,0.5", "max-updates": 60, "workers": "0", "task-timeout": 10}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on devices with random behaviour, in the place of one on real devices."""
    folder = tmp_path_factory.mktemp("trace")
    (folder / "churn.toml").write_text(CHURN)
    return play(folder / "out", str(folder / "churn.toml"), strategy="fedasync", seed=5)


def play(out: Path, devices: str, **keys: Any) -> Path:
    mapping = {**KEYS, **keys, "devices": devices, "out": str(out)}
    simulate(RunConfig.from_mapping(mapping))
    return out


def arrivals(record: RunRecord) -> list[tuple[str, float]]:
    """Return client and time of all replies, accepted or not, to the microsecond."""
    rows = [
        (float(time), str(client))
        for kind in (record.updates, record.rejections)
        for time, client in zip(kind.time, kind.client, strict=True)
    ]
    return [(client, round(time, 6)) for time, client in sorted(rows)]


def test_replies_arrive_in_the_recorded_order_and_at_the_recorded_times(
    recorded: Path, tmp_path: Path
) -> None:
    # Method, seed and models differ, but the times are the same.
    replayed = play(tmp_path / "out", f"trace:{recorded}", strategy="casa", seed=1)
    then, now = read_run(recorded), read_run(replayed)
    assert len(then.rejections.time) > 2
    assert arrivals(now) == arrivals(then)
    assert list(now.updates.client) == list(then.updates.client)
    assert list(now.updates.train_loss) != list(then.updates.train_loss)


def test_a_longer_run_begins_again_with_the_first_recorded_task(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", {"client-0": [1.0, 2.0, 4.0], "client-1": [5.0]})
    out = play(tmp_path / "out", f"trace:{folder}", clients=2, **{"max-updates": 10})
    updates = read_run(out).updates
    mine = updates.time[updates.client == "client-0"]
    assert list(mine[:7]) == [1.0, 3.0, 7.0, 8.0, 10.0, 14.0, 15.0]


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [
        # Each client continues when the server has sent its next task, 0.125 or 0.25 s later.
        ({"client-0": [0.0, 1.125], "client-1": [0.0, 1.75]}, {0: [1.0, 1.125], 1: [1.5, 1.25]}),
        # Both wait for the slower client.
        ({"client-0": [0.0, 1.75], "client-1": [0.0, 1.75]}, {0: [1.0, 1.0], 1: [1.5, 1.0]}),
    ],
    ids=["at once", "in rounds"],
)
def test_what_the_server_took_is_of_the_rhythm_and_waiting_for_others_is_not(
    tmp_path: Path, sent: dict[str, list[float]], seconds: dict[int, list[float]]
) -> None:
    """Without staleness, as if each client had its own cluster."""
    first = {"client-0": 1.0, "client-1": 1.5}
    tasks = [(client, at[0], at[0] + first[client]) for client, at in sent.items()]
    tasks += [(client, at[1], at[1] + 1.0) for client, at in sent.items()]
    with RunStore(tmp_path) as store:
        for client in sent:
            store.observe(events.ClientJoined(0.0, client, 1, 10, None))
        for number, task in enumerate(sorted(tasks, key=lambda task: task[2])):
            store.observe(update(number + 1, *task))
    devices, _ = traced_fleet(str(tmp_path), 2)
    for number, wanted in seconds.items():
        tasks = devices[number].tasks  # type: ignore[attr-defined]
        assert [task.seconds for task in tasks[:2]] == wanted


def test_the_mean_duration_is_that_of_the_recorded_tasks() -> None:
    device = TracedDevice(tasks=(ReplayedTask(1.0), ReplayedTask(3.0, "lost")))
    assert device.mean_duration(Workload(examples=10)) == 2.0


def test_devices_keep_the_names_that_they_had(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", {"kitchen": [1.0], "attic": [2.0]})
    devices, names = traced_fleet(str(folder), 2)
    assert names == ["attic", "kitchen"]
    assert [device.tasks[0].seconds for device in devices] == [2.0, 1.0]  # type: ignore[attr-defined]
    out = play(tmp_path / "out", f"trace:{folder}", clients=2, **{"max-updates": 3})
    assert {client.client for client in read_run(out).clients} == {"attic", "kitchen"}


def test_a_recorded_device_is_online_when_it_was_online(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        for event in (
            events.ClientJoined(0.0, "client-0", 1, 10, None),
            events.ClientJoined(0.5, "client-1", 2, 10, None),
            update(1, "client-0", 0.0, 1.0),
            events.ClientLeft(2.0, "client-0"),
            update(2, "client-1", 0.5, 3.0),
            events.ClientJoined(4.0, "client-0", 3, 10, None, returned=True),
        ):
            store.observe(event)
    (first, second), _ = traced_fleet(str(tmp_path), 2)
    assert first.online == ((0.0, 2.0), (4.0, float("inf")))
    assert second.online == ((0.5, float("inf")),)


def record(folder: Path, seconds: dict[str, list[float]]) -> Path:
    """Write a run store of clients that were online from the start."""
    with RunStore(folder) as store:
        number = 0
        for client, durations in seconds.items():
            store.observe(events.ClientJoined(0.0, client, 1, 10, None))
            time = 0.0
            for duration in durations:
                number += 1
                store.observe(update(number, client, time, time + duration))
                time += duration
    return folder


def update(number: int, client: str, sent: float, returned: float) -> events.UpdateApplied:
    return events.UpdateApplied(number, returned, client, 0, 0, 0, 0.5, sent, 0.1, 1, 1)


# Errors.


@pytest.mark.parametrize(
    ("seconds", "clients", "message"),
    [
        ({}, 2, "has no updates: there are no times to replay"),
        ({"client-0": [1.0], "client-1": [1.0]}, 3, r"use --clients 2"),
        ({"client-0": [1.0], "client-7": [1.0]}, 1, r"2 clients \(client-0, client-7\), this one"),
    ],
)
def test_a_trace_that_does_not_fit_is_refused(
    seconds: dict[str, list[float]], clients: int, message: str, tmp_path: Path
) -> None:
    folder = record(tmp_path / "run", seconds)
    with pytest.raises(UserError, match=message):
        traced_fleet(str(folder), clients)


def test_a_trace_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no run store"):
        traced_fleet(str(tmp_path), 2)
    with pytest.raises(UserError, match="needs the folder of a run"):
        traced_fleet("", 2)
    with pytest.raises(UserError, match="There is no run store"):
        play(tmp_path / "out", f"trace:{tmp_path}")


def test_on_virtual_time_no_clock_of_a_machine_is_asked(recorded: Path) -> None:
    updates = [event for event in read_events(recorded) if isinstance(event, events.UpdateApplied)]
    assert len(updates) == 60
    assert all(update.started_at is None and update.finished_at is None for update in updates)


# The radio uplink: path loss and Shannon's rate by hand, and invalid values.


def link(**values: float) -> Uplink:
    usual = {"uplink_hz": 1e6, "transmit_dbm": 23.0, "distance_km": 1.0, "noise_dbm": -114.0}
    return Uplink(**{**usual, **values})


def test_the_path_loss_by_hand() -> None:
    assert path_loss(1.0) == 128.1
    # At a tenth of the distance: 37.6 dB less.
    assert path_loss(0.1) == pytest.approx(90.5)
    # log10(2) = 0.30103.
    assert path_loss(2.0) == pytest.approx(128.1 + 11.3187, abs=1e-4)


def test_the_rate_by_hand() -> None:
    # 23 - 128.1 + 114 = 8.9 dB, a ratio of 7.76247; log2(8.76247) = 3.13134 bit/s per hertz.
    near = link()
    assert near.signal_to_noise == pytest.approx(7.76247, rel=1e-6)
    assert near.bytes_per_second == pytest.approx(3.13134e6 / 8, rel=1e-5)
    # Equal power and noise at the receiver: log2(2) = 1 bit/s per hertz.
    assert link(transmit_dbm=14.1, uplink_hz=8e5).bytes_per_second == pytest.approx(1e5)


def test_the_rate_falls_with_the_distance_and_grows_with_the_band() -> None:
    rates = [link(distance_km=distance).bytes_per_second for distance in (0.1, 0.5, 1.0, 2.0)]
    assert rates == sorted(rates, reverse=True)
    assert link(uplink_hz=2e6).bytes_per_second == 2 * link().bytes_per_second


def test_a_weak_signal_has_a_small_rate_and_not_none() -> None:
    # At -200 dB 1 + SNR is 1 in floating point, where log2(1 + s) is s / ln 2.
    weak = link(transmit_dbm=-185.9)
    assert weak.bytes_per_second == pytest.approx(1e6 * 1e-20 / math.log(2) / 8)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"uplink_hz": 0.0}, "uplink-hz must be greater than 0, got 0"),
        ({"distance_km": -1.0}, "distance-km must be greater than 0, got -1"),
        ({"noise_dbm": math.inf}, "noise-dbm must be a finite number, got inf"),
        ({"transmit_dbm": math.nan}, "transmit-dbm must be a finite number, got nan"),
        ({"distance_km": 1e300}, "give an uplink of 0 bytes per second"),
        ({"transmit_dbm": 1e4}, "give an uplink of inf bytes per second"),
    ],
)
def test_impossible_links_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        link(**values)
