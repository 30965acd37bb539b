"""Fixtures of all tests."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

# Otherwise gRPC handles every fork; about 1 in 50 forks of a process that uses it then hangs before
# it starts its program, for instance a process of a Ray cluster.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"
# Otherwise Ray's processes join the cluster that was started last on this machine, of another test
# or of a run that has crashed.
os.environ["RAY_ADDRESS"] = "local"

# Imported here, because its first import sets the levels that the fixture below changes.
import flwr.common.logger  # noqa: F401
import hypothesis
import pytest
from forking import Commands, commands
from painting import PAINTED, paint_only_if_told

# The default deadline of 200 ms per example is too short on a busy machine.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

paint_only_if_told()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Paint figures for tests that look at them, and for their fixtures of any scope."""
    os.environ[PAINTED] = str(int(item.get_closest_marker("pictures") is not None))


@pytest.fixture(autouse=True)
def _logs_reach_caplog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `caplog` see all logs, even after a command in a test has silenced them."""
    for name in ("flwr", "raceme"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    logging.getLogger("flwr").setLevel(logging.INFO)


@pytest.fixture(autouse=True)
def _log_handlers_end_with_their_test() -> Iterator[None]:
    """Remove handlers that a command has added, which would write to a closed file later."""
    loggers = [logging.getLogger(name) for name in (None, "raceme", "flwr")]
    before = [list(logger.handlers) for logger in loggers]
    yield
    for logger, kept in zip(loggers, before, strict=True):
        for handler in set(logger.handlers).difference(kept):
            if not type(handler).__module__.startswith("_pytest"):
                logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep data that tests read out of the user's cache."""
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
"""Slow files, which start first: at the end they would occupy one process while others idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the test files that take longest first."""
    items.sort(key=lambda item: item.path.name not in _LONGEST)


def pytest_xdist_auto_num_workers() -> int:
    """Use one process more than there are cores, as many tests wait for other processes."""
    return len(os.sched_getaffinity(0)) + 1
