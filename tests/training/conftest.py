"""Fixtures of all tests of training."""

import pytest

from raceme.flower.messages import identify_process


@pytest.fixture(autouse=True)
def _identity() -> None:
    """Let replies be made in this process, as in a worker or on a device."""
    identify_process()
