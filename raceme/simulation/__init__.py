"""Virtual time: a Flower Grid that simulates a fleet of devices, event by event."""

from raceme.simulation.devices import PROFILES, Device, fleet
from raceme.simulation.executor import Executor, InProcess
from raceme.simulation.virtual_grid import Node, VirtualGrid

__all__ = ["PROFILES", "Device", "Executor", "InProcess", "Node", "VirtualGrid", "fleet"]
