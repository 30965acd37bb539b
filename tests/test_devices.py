"""Device profiles: the built-in ones, a person's own, and what is said about mistakes in them."""

from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from raceme.errors import UserError
from raceme.simulation import PROFILES, Device, fleet
from raceme.simulation.devices import summaries


def profile(folder: Path, text: str) -> str:
    """Write a profile and return its path."""
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def speeds(devices: list[Device]) -> Counter[float]:
    return Counter(device.seconds_per_round for device in devices)


# The built-in ones.


def test_the_built_in_profiles_have_one_line_of_description_each() -> None:
    assert set(PROFILES) == {"uniform", "slow30x5", "slow30x10", "range1to5"}
    assert all(text and "\n" not in text for text in summaries().values())


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


# A person's own.


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


def test_an_empty_profile_is_a_fleet_of_default_devices(tmp_path: Path) -> None:
    assert fleet(profile(tmp_path, ""), 2, 0) == [Device(), Device()]


# Coming and going.


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
        device.duration(10, 1, 100, 100, 1.0, rng)
        assert rng.uniform() == np.random.default_rng(7).uniform(size=2)[1]


# Mistakes.


def test_an_unknown_profile_is_met_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"Unknown device profile 'slow30x6'.*Did you mean 'slow30"):
        fleet("slow30x6", 4, 0)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UserError, match=r"Cannot read .*nowhere/a.toml: No such file"):
        fleet("nowhere/a.toml", 4, 0)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not a text file"):
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
        ("[[group]]\nshare = 0.6\n[[group]]\nshare = 0.5", "must not exceed 1 together, got 1.1"),
        ("[[group]]\nclients = 3", "clients takes a list"),
        ("[[group]]\nclients = [-1]", "clients takes a list"),
        ("[[group]]\nclients = ['a']", "clients takes a list"),
        ("[[group]]\nclients = [1.5]", "clients takes a list"),
        ("[device]\nseconds-per-round = -1", "seconds-per-round must be a number from 0 on"),
        ("[device]\nseconds-per-round = nan", "seconds-per-round must be a number from 0 on"),
        ("[device]\nbandwidth-up = inf", "bandwidth-up must be a number from 0 on"),
        ("[device]\nseconds-per-round = 'slow'", "seconds-per-round must be a number"),
        ("[device]\nseconds-per-round = [1]", r"takes \[low, high\]"),
        ("[device]\nseconds-per-round = [5, 1]", r"takes \[low, high\]"),
        ("[device]\nseconds-per-round = [1, 'x']", "must be a number"),
        ("[device]\njitter = 1.5", "between 0 and 1"),
        ("[device]\ndrop = 2", "between 0 and 1"),
        ("[device]\nmean-online = 2", "go together"),
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
