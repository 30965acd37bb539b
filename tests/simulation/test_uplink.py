"""The radio uplink: path loss and Shannon's rate by hand, and what cannot be."""

import math

import pytest

from raceme.core.errors import UserError
from raceme.simulation.devices import Uplink, path_loss


def link(**values: float) -> Uplink:
    usual = {"uplink_hz": 1e6, "transmit_dbm": 23.0, "distance_km": 1.0, "noise_dbm": -114.0}
    return Uplink(**{**usual, **values})


def test_the_path_loss_by_hand() -> None:
    assert path_loss(1.0) == 128.1
    # A tenth of the distance: 37.6 dB less.
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
    # At -200 dB 1 + SNR is 1 in floating point; log2(1 + s) is s / ln 2 there.
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
