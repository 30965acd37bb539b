"""Fixtures of all tests."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

# gRPC would otherwise act on every fork. Of a process in which it is in use, one in fifty never
# becomes the program that it is for: a Ray cluster starts with such forks.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"

# Imported here: its first import sets what the fixture below changes.
import flwr.common.logger  # noqa: F401
import hypothesis
import pytest
from forking import Commands, commands

# On a busy machine an example takes longer than the 200 ms that are allowed by default.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _logs_reach_caplog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `caplog` see all logs, also after a command of a test that has silenced them."""
    for name in ("flwr", "raceme"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    logging.getLogger("flwr").setLevel(logging.INFO)


@pytest.fixture(autouse=True)
def _log_handlers_end_with_their_test() -> Iterator[None]:
    """Take away what a command has logged with: later it would write to a closed file."""
    loggers = [logging.getLogger(name) for name in (None, "raceme", "flwr")]
    before = [list(logger.handlers) for logger in loggers]
    yield
    for logger, kept in zip(loggers, before, strict=True):
        for handler in set(logger.handlers).difference(kept):
            if not type(handler).__module__.startswith("_pytest"):
                logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what tests read out of the user's cache."""
    folder: Path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("RACEME_CACHE", str(folder))


@pytest.fixture(scope="session")
def command() -> Iterator[Commands]:
    """Offer `raceme` without the seconds that it takes to start."""
    with commands() as opened:
        yield opened


_LONGEST = (
    "test_serve.py",
    "test_serve_strangers.py",
    "test_compare.py",
    "test_checkpoints.py",
    "test_cli.py",
    "test_flower.py",
    "test_extending.py",
    "test_device.py",
    "test_testbed.py",
    "test_serve_app.py",
    "test_serve_useless_replies.py",
)
"""Files that take long: begun last, they would leave one process alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest."""
    items.sort(key=lambda item: item.path.name not in _LONGEST)


def pytest_xdist_auto_num_workers() -> int:
    """Use one process more than there are cores: many tests wait for other processes."""
    return len(os.sched_getaffinity(0)) + 1
