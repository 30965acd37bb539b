"""The radio uplink of a device under frequency division (FDMA): how fast it sends.

Every device has a band of its own. Shannon's rate of a band of B hertz is B log2(1 + SNR) bit/s
with SNR = p g(d) / σ²: transmit power, path gain over the distance d, noise in the band. The path
loss is that of 3GPP's urban macro cell, PL(d) = 128.1 + 37.6 log10(d / km) dB.

Source: Zhang et al., "CSAFL: A Clustered Semi-Asynchronous Federated Learning Framework", IJCNN
2021, section on latency. The downlink is ignored there, as the base station has power enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from raceme.config.errors import UserError

_BITS_PER_BYTE = 8
_MOST_DB = 3000.0
"""A ratio beyond it is no floating-point number any more."""


@dataclass(frozen=True)
class Uplink:
    """A radio link to the base station. All four are to be given.

    Attributes
    ----------
    uplink_hz : float
        Bandwidth B in hertz.
    transmit_dbm : float
        Transmit power p in dBm (23 dBm are 0.2 W).
    distance_km : float
        Distance d to the base station in kilometres.
    noise_dbm : float
        Noise power σ² in the band, in dBm (-114 dBm is thermal noise in 1 MHz).
    """

    uplink_hz: float
    transmit_dbm: float
    distance_km: float
    noise_dbm: float

    def __post_init__(self) -> None:
        for item in fields(Uplink):
            name, value = item.name.replace("_", "-"), getattr(self, item.name)
            if not math.isfinite(value):
                raise UserError(f"Device: {name} must be a finite number, got {value:g}.")
            if not name.endswith("-dbm") and value <= 0:
                raise UserError(f"Device: {name} must be greater than 0, got {value:g}.")
        if not 0 < self.bytes_per_second < math.inf:
            raise UserError(
                f"Device: uplink-hz {self.uplink_hz:g}, transmit-dbm {self.transmit_dbm:g}, "
                f"distance-km {self.distance_km:g} and noise-dbm {self.noise_dbm:g} give an uplink "
                f"of {self.bytes_per_second:g} bytes per second."
            )

    @property
    def signal_to_noise(self) -> float:
        """The ratio of received power to noise (not in dB)."""
        received = self.transmit_dbm - path_loss(self.distance_km)
        decibels = received - self.noise_dbm
        return math.inf if decibels > _MOST_DB else math.pow(10.0, decibels / 10)

    @property
    def bytes_per_second(self) -> float:
        """Shannon's rate of the link."""
        # log1p: far away the ratio is so small that 1 + SNR would be rounded to 1.
        bits = self.uplink_hz * math.log1p(self.signal_to_noise) / math.log(2)
        return bits / _BITS_PER_BYTE


def path_loss(distance_km: float) -> float:
    """Return the path loss in dB over a distance in kilometres."""
    return 128.1 + 37.6 * math.log10(distance_km)
