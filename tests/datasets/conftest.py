"""Fixtures of all tests of data sets."""

import pytest

from raceme import datasets


@pytest.fixture(autouse=True)
def _nothing_loaded() -> None:
    """Drop loaded data: they are kept by configuration, and files of tests change beneath it."""
    datasets.forget()
