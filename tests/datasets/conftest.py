"""Fixtures of all tests of data sets."""

import pytest

from raceme import datasets


@pytest.fixture(autouse=True)
def _nothing_loaded() -> None:
    """Drop cached data: the cache is keyed by configuration, but tests change the files."""
    datasets.forget()
