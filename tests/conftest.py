"""What all tests have in common."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what tests read out of the user's cache."""
    folder: Path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("RACEME_CACHE", str(folder))
