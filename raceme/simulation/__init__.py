"""Virtual time: a Flower Grid that simulates a fleet of devices, event by event."""

from raceme.simulation.choice import executor_for, is_ray, prepare, training_seconds
from raceme.simulation.devices import PROFILES, Device, fleet
from raceme.simulation.executor import Executor, InProcess
from raceme.simulation.nodes import communication_of, nodes_of
from raceme.simulation.pool import Pool
from raceme.simulation.virtual_grid import Node, VirtualGrid

__all__ = [
    "PROFILES",
    "Device",
    "Executor",
    "InProcess",
    "Node",
    "Pool",
    "VirtualGrid",
    "communication_of",
    "executor_for",
    "fleet",
    "is_ray",
    "nodes_of",
    "prepare",
    "training_seconds",
]
