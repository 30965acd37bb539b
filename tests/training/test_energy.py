"""What work costs: readers of energy on folders laid out like Linux's, and what a client states."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from flwr.app import MetricRecord
from hypothesis import given
from hypothesis import strategies as st
from nodes import context, message

from raceme import client_app
from raceme.core.messages import MOST_JOULES, MOST_SECONDS, Cost, InvalidReplyError, cost_of
from raceme.flower.messages import identify_process
from raceme.training.machine import Ina3221, Rapl, measured, meter_of


def zone(system: Path, name: str, called: str, micro: int, largest: int = 10**9) -> Path:
    """Write a zone of RAPL as the kernel lays it out, flat under the class."""
    folder = system / "powercap" / name
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{called}\n")
    (folder / "energy_uj").write_text(f"{micro}\n")
    (folder / "max_energy_range_uj").write_text(f"{largest}\n")
    return folder


def chip(system: Path, number: int, name: str, **lines: tuple[int, int]) -> Path:
    """Write a chip of hwmon: lines of millivolts and milliamperes, by label."""
    folder = system / "hwmon" / f"hwmon{number}"
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    for channel, (label, (volts, amperes)) in enumerate(lines.items(), 1):
        (folder / f"in{channel}_label").write_text(f"{label}\n")
        (folder / f"in{channel}_input").write_text(f"{volts}\n")
        (folder / f"curr{channel}_input").write_text(f"{amperes}\n")
    return folder


def test_rapl_adds_up_packages_and_memory_and_not_what_they_contain(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000)
    other = zone(tmp_path, "intel-rapl:1", "package-1", 0)
    cores = zone(tmp_path, "intel-rapl:0:0", "core", 500_000)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 999_000_000)
    board = zone(tmp_path, "intel-rapl:2", "psys", 0)
    meter = Rapl.found(tmp_path)
    assert meter is not None
    meter.start()
    (package / "energy_uj").write_text("3500000\n")
    (other / "energy_uj").write_text("1000000\n")
    (cores / "energy_uj").write_text("99000000\n")
    (board / "energy_uj").write_text("99000000\n")
    # Counts up to 1,000 J and then from 0 again: 1 J to its end, and 0.25 J.
    (memory / "energy_uj").write_text("250000\n")
    assert meter.joules() == pytest.approx(2.5 + 1.0 + 1.25)


def test_rapl_that_cannot_be_read_is_none_and_one_that_breaks_off_says_nothing(
    tmp_path: Path,
) -> None:
    assert Rapl.found(tmp_path) is None
    package = zone(tmp_path, "intel-rapl:0", "package-0", 7)
    meter = Rapl.found(tmp_path)
    assert meter is not None
    meter.start()
    (package / "energy_uj").write_text("what?")
    assert meter.joules() is None
    # Without rights the file is there and empty to this reader.
    (package / "energy_uj").unlink()
    assert Rapl.found(tmp_path) is None


def test_a_jetsons_power_is_summed_over_time(tmp_path: Path) -> None:
    chip(tmp_path, 0, "cpu_thermal", VDD_IN=(9000, 9000))
    board = chip(tmp_path, 3, "ina3221", VDD_IN=(5000, 1000), VDD_CPU_GPU_CV=(5000, 700))
    times = iter((10.0, 12.0, 13.0))
    meter = Ina3221.found(tmp_path)
    assert meter is not None
    meter._clock = lambda: next(times)
    meter.sample()
    (board / "curr1_input").write_text("2000\n")
    meter.sample()
    # 5 W and then 10 W: 2 s at 7.5 W, and 1 s at 10 W. The inner line is in the whole.
    assert meter.joules() == pytest.approx(15.0 + 10.0)


def test_without_a_line_of_the_whole_board_all_lines_are_added_up(tmp_path: Path) -> None:
    chip(tmp_path, 1, "ina3221", VDD_GPU_SOC=(5000, 1000), VDD_CPU_CV=(5000, 200))
    chip(tmp_path, 2, "ina3221", VDDQ_VDD2_1V8AO=(1000, -8))
    times = iter((0.0, 2.0))
    meter = Ina3221.found(tmp_path)
    assert meter is not None
    meter._clock = lambda: next(times)
    meter.sample()
    assert meter.joules() == pytest.approx(2 * (5.0 + 1.0 - 0.008))


def test_the_meter_samples_while_work_goes_on_and_ends_with_it(tmp_path: Path) -> None:
    chip(tmp_path, 0, "ina3221", VDD_IN=(5000, 1000))
    meter = meter_of(tmp_path)
    assert isinstance(meter, Ina3221)
    with measured(meter) as cost:
        sum(range(10**6))
    assert cost["joules"] > 0
    assert cost["cpu-seconds"] > 0
    assert meter._thread is None


def test_a_machine_that_tells_nothing_has_no_meter(tmp_path: Path) -> None:
    assert meter_of(tmp_path) is None
    with measured(None) as cost:
        pass
    assert set(cost) == {"cpu-seconds"}


def test_a_client_states_costs_where_times_are_asked_for_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identify_process()
    chip(tmp_path, 0, "ina3221", VDD_IN=(5000, 1000))
    monkeypatch.setattr(client_app, "_meter", lambda: meter_of(tmp_path))
    told = client_app.app(message("train", {"report-timing": True}), context(0)).content
    cost = cost_of(dict(told.metric_records["metrics"]))
    assert 0 < cost.cpu_seconds < 600  # type: ignore[operator]
    assert 0 < cost.joules < 6000  # type: ignore[operator]
    untold = client_app.app(message("train", {}), context(0)).content
    assert cost_of(dict(untold.metric_records["metrics"])) == Cost()


@pytest.mark.parametrize("name", ["cpu-seconds", "joules"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e-9, 1e12, 1e308, 10**400])
def test_a_cost_that_cannot_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidReplyError):
        cost_of({name: value})


@given(st.floats(0, MOST_SECONDS), st.floats(0, MOST_JOULES))
def test_a_cost_that_can_be_is_taken_as_it_is(seconds: float, joules: float) -> None:
    metrics = MetricRecord({"cpu-seconds": seconds, "joules": joules, "train-loss": 1.0})
    assert cost_of(dict(metrics)) == Cost(seconds, joules)
