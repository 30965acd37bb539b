"""Fixtures of all tests of training."""

import pytest

from raceme.flower.messages import identify_process


@pytest.fixture(autouse=True)
def _identity() -> None:
    """Allow this process to make replies, as a worker or a device does."""
    identify_process()
