"""What is private in Flower is used in one module only, and is still as that module expects."""

import ast
import time
from pathlib import Path

import pytest
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

import raceme
from raceme.flower.messages import (
    CLIENT_APP_RAISED_EXCEPTION,
    MESSAGE_UNAVAILABLE,
    NODE_UNAVAILABLE,
    REPLY_MESSAGE_UNAVAILABLE,
    SERVER_NODE_ID,
    array_record,
    empty_run,
    error_reply,
    identify_process,
    set_message_id,
    start_now,
)
from raceme.flower.messages import array as flower_array

PACKAGE = Path(raceme.__file__).parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if ".mypy_cache" not in path.parts)
PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp")


def imports_of(path: Path) -> set[str]:
    """Return the absolute names of the modules that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add(str(node.module))
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def is_within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_bridge_uses_what_is_private_in_flower(path: Path) -> None:
    if "flower" in path.relative_to(PACKAGE).parts:
        return
    private = {
        name
        for name in imports_of(path)
        if is_within(name, "flwr") and name != "flwr" and not is_within(name, *PUBLIC)
    }
    assert not private, f"{path.name} imports {private}: move that to raceme/flower"
    source = path.read_text(encoding="utf-8")
    assert '_message_id"]' not in source
    assert "TaskIdentity" not in source


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "strategies").glob("*.py")), ids=lambda path: path.name
)
def test_strategies_know_neither_torch_nor_the_simulator(path: Path) -> None:
    forbidden = ["torch", "torchvision", "raceme.simulation", "raceme.datasets", "raceme.training"]
    if path.name not in ("conduct.py", "base.py", "rounds.py"):
        forbidden.append("raceme.core.timeline")
    found = {name for name in imports_of(path) if is_within(name, *forbidden)}
    assert not found, f"{path.name} imports {found}"


def test_a_message_can_be_made_once_the_process_says_whose_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, None)
    identify_process(run_id=5, node_id=SERVER_NODE_ID, task_id=9)
    message = Message(RecordDict(), 42, "train", ttl=60.0)
    assert message.metadata.run_id == 5
    assert message.metadata.src_node_id == SERVER_NODE_ID
    assert message.metadata.dst_node_id == 42
    assert message.metadata.ttl == 60.0


def test_a_message_takes_an_id_and_its_replies_state_it() -> None:
    identify_process()
    message = Message(RecordDict(), 42, "train")
    set_message_id(message, "00000007")
    assert message.metadata.message_id == "00000007"
    reply = Message(RecordDict(), reply_to=message)
    assert reply.metadata.reply_to_message_id == "00000007"
    assert reply.metadata.src_node_id == 42
    assert reply.metadata.dst_node_id == SERVER_NODE_ID


def test_a_message_that_waited_long_has_its_whole_time_to_live_again() -> None:
    identify_process()
    message = Message(RecordDict(), 42, "train", ttl=60.0)
    message.metadata.created_at -= 1000.0
    start_now(message)
    assert abs(message.metadata.created_at - time.time()) < 5.0
    assert 50.0 < Message(RecordDict(), reply_to=message).metadata.ttl <= 60.0


def test_an_error_reply_is_flowers() -> None:
    identify_process()
    message = Message(RecordDict(), 42, "train")
    set_message_id(message, "00000008")
    reply = error_reply(message, NODE_UNAVAILABLE, "gone")
    assert reply.has_error()
    assert not reply.has_content()
    assert isinstance(reply.error, Error)
    assert (reply.error.code, reply.error.reason) == (NODE_UNAVAILABLE, "gone")
    assert reply.metadata.reply_to_message_id == "00000008"


def test_error_codes_are_four_different_numbers() -> None:
    codes = {
        CLIENT_APP_RAISED_EXCEPTION,
        MESSAGE_UNAVAILABLE,
        NODE_UNAVAILABLE,
        REPLY_MESSAGE_UNAVAILABLE,
    }
    assert len(codes) == 4
    assert all(isinstance(code, int) for code in codes)


def test_the_run_of_a_simulation_has_the_number_asked_for() -> None:
    assert empty_run(3).run_id == 3


def test_records_made_without_checks_are_those_of_flower() -> None:
    parts = ("float32", (2, 3), "numpy.ndarray", b"24 bytes, or any of them")
    array = flower_array(*parts)
    assert array == Array(*parts)
    record = array_record({"weight": array})
    theirs = ArrayRecord({"weight": Array(*parts)})
    assert record == theirs
    assert record["weight"] is array
    # What goes over the network, and how it is called there.
    assert record.deflate() == theirs.deflate()
    assert record.object_id == theirs.object_id
    assert record.count_bytes() == theirs.count_bytes()
    record["bias"] = array
    assert list(record) == ["weight", "bias"]
    array.data = b"other"
    assert array.object_id == Array(*parts[:3], b"other").object_id
