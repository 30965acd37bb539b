"""Flower's private names are used in one module only, and still behave as it expects."""

import ast
import re
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.common import constant
from flwr.common.serde import fab_from_proto, message_to_proto, run_from_proto
from flwr.supercore.constant import (
    NOOP_FEDERATION_ID,
    OBJECT_PUSH_SESSION_TTL_SECONDS,
    SYSTEM_MESSAGE_TYPE,
    TaskType,
)
from flwr.supercore.error import ApiErrorCode
from flwr.supercore.primitives import asymmetric
from flwr.supercore.task_identity import TaskIdentity

import raceme
from raceme.flower import fleet_protocol, grid, link_state, messages, objects
from raceme.flower.app import App
from raceme.flower.fleet_protocol import ErrorNumber, Signer
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
    """Return the absolute names of all modules that a file imports."""
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


# -----------------------------------------------------------------------------
# Names of Flower's private code that `raceme serve` imports.
# -----------------------------------------------------------------------------


SERVE, APPS = "raceme.fleet.serve", "raceme.flower.app"
MOST_PRIVATE = 10
DOCUMENTED = (*PUBLIC, "flwr.clientapp.mod", "flwr.clientapp.typing", "flwr.serverapp.strategy")
SUPERLINK = ("flwr.superlink", "flwr.server.superlink")
PAGE = PACKAGE.parent / "docs" / "research" / "architecture.md"


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield all imports at run time, as a module and a name in it or an empty text."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((str(node.module), alias.name) for alias in node.names)
        yield from imported(node)


def file_of(module: str) -> Path | None:
    """Return the file of a module of Raceme, or None."""
    place = PACKAGE.parent.joinpath(*module.split("."))
    files = (place.with_suffix(".py"), place / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def reached(start: str) -> dict[str, set[tuple[str, str]]]:
    """Return the imports of a module and of all modules that it imports, by module."""
    found: dict[str, set[tuple[str, str]]] = {}
    todo = [start]
    while todo:
        module = todo.pop()
        file = file_of(module)
        if file is None or module in found:
            continue
        found[module] = set(imported(ast.parse(file.read_text(encoding="utf-8"))))
        for name, item in found[module]:
            todo += [name, f"{name}.{item}"]
    return found


def privates(names: set[tuple[str, str]]) -> set[str]:
    """Return the given names that Flower does not document."""
    return {
        f"{module}.{name}".rstrip(".")
        for module, name in names
        if is_within(module, "flwr")
        # The protocol buffers are the stable wire format.
        and not is_within(module, "flwr.proto")
        and not (module in DOCUMENTED and (not name or is_exported(module, name)))
    }


def is_exported(module: str, name: str) -> bool:
    loaded = import_module(module)
    return name in getattr(loaded, "__all__", vars(loaded))


def listed(heading: str) -> set[str]:
    """Return the names of Flower in the table below a heading of the page."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f"\n### {heading}\n")
    assert rest, heading
    section = re.split(r"^#", rest, maxsplit=1, flags=re.MULTILINE)[0]
    return set(re.findall(r"^\| `(flwr\.[^`]*)` \|", section, flags=re.MULTILINE))


def test_a_server_needs_few_private_names_of_flower_and_the_page_lists_them() -> None:
    modules = reached(SERVE)
    apps = privates(modules.pop(APPS))
    fleet = set().union(*map(privates, modules.values()))
    assert {"raceme.flower.link_state", "raceme.flower.fleet_server"} <= modules.keys()
    assert fleet == listed("The served fleet")
    assert apps == listed("Flower apps")
    assert not [name for name in fleet | apps if is_within(name, *SUPERLINK)]
    core = {name for name in apps if is_within(name, "flwr.supercore")}
    assert len(fleet | core) <= MOST_PRIVATE


def test_a_server_imports_nothing_of_a_device() -> None:
    modules = reached(SERVE)
    assert not {"raceme.flower.fleet_client", "raceme.fleet.device"} & modules.keys()


def test_constants_of_the_protocol_are_flowers() -> None:
    assert {number.name: int(number) for number in ErrorNumber} == {
        number.name: int(ApiErrorCode[number.name]) for number in ErrorNumber
    }
    for name in ("CALL_TIMEOUT", "DEFAULT_INTERVAL", "MIN_INTERVAL", "MAX_INTERVAL", "PATIENCE"):
        name = f"HEARTBEAT_{name}"
        assert getattr(fleet_protocol, name) == getattr(constant, name), name
    assert fleet_protocol._OLDEST_SECONDS == constant.TIMESTAMP_TOLERANCE
    assert fleet_protocol._SKEW_SECONDS == constant.SYSTEM_TIME_TOLERANCE
    assert link_state._TTL_TOLERANCE == constant.MESSAGE_TTL_TOLERANCE
    assert link_state._RUNNING == constant.Status.RUNNING
    assert objects.UPLOAD_SECONDS == OBJECT_PUSH_SESSION_TTL_SECONDS
    assert grid._SYSTEM_MESSAGE == SYSTEM_MESSAGE_TYPE
    assert SERVER_NODE_ID == constant.SUPERLINK_NODE_ID
    codes = constant.ErrorCode
    assert messages.UNKNOWN_ERROR == codes.UNKNOWN
    assert messages.LOAD_APP_EXCEPTION == codes.LOAD_CLIENT_APP_EXCEPTION
    assert messages.INVALID_APP == codes.INVALID_FAB
    for name in ("CLIENT_APP_RAISED_EXCEPTION", "MESSAGE_UNAVAILABLE", "NODE_UNAVAILABLE"):
        assert getattr(messages, name) == getattr(codes, name)
    assert REPLY_MESSAGE_UNAVAILABLE == codes.REPLY_MESSAGE_UNAVAILABLE


def test_keys_and_signatures_are_flowers() -> None:
    private, public = fleet_protocol.generate_keys()
    signed = dict(Signer(private, public).metadata())
    key, signature = signed["flwr-public-key-bin"], signed["flwr-signature-bin"]
    assert asymmetric.bytes_to_public_key(key) == public
    assert asymmetric.verify_signature(public, signed["flwr-timestamp"].encode(), signature)
    assert public.curve.name == asymmetric.generate_key_pairs()[1].curve.name


def test_a_run_is_told_as_flower_tells_it() -> None:
    config = {"rounds": 3, "rate": 0.5, "fast": True, "name": "x"}
    state = link_state.LinkState(App("tests/none", "1.0.0", b"a bundle", config))
    told = run_from_proto(state.run_record())
    assert told.override_config == config
    assert type(told.override_config["fast"]) is bool
    assert (told.run_id, told.fab_id, told.fab_version) == (state.run_id, "tests/none", "1.0.0")
    assert (told.status.status, told.primary_task_type) == ("running", TaskType.SERVER_APP)
    assert (told.flwr_aid, told.federation_id) == (constant.NOOP_FLWR_AID, NOOP_FEDERATION_ID)
    bundle = state.bundle(told.fab_hash)
    assert bundle is not None
    assert fab_from_proto(bundle).content == b"a bundle"
    assert state.bundle("another") is None
    assert state.run.override_config == config
    assert (state.run.run_id, state.run.fab_hash) == (told.run_id, told.fab_hash)


def test_heads_of_messages_are_as_flower_makes_them() -> None:
    identify_process()
    message = Message(RecordDict({"a": array_record({})}), 42, "train")
    alone = messages.without_content(message)
    assert message_to_proto(alone) == message_to_proto(remove_content_from_message(message))
    error = messages.made(message.metadata, error=Error(3, "gone"))
    flowers = make_message(message.metadata, error=Error(3, "gone"))
    assert message_to_proto(error) == message_to_proto(flowers)
    assert messages.without_content(error) is error


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
    # The serialised form and its id.
    assert record.deflate() == theirs.deflate()
    assert record.object_id == theirs.object_id
    assert record.count_bytes() == theirs.count_bytes()
    record["bias"] = array
    assert list(record) == ["weight", "bias"]
    array.data = b"other"
    assert array.object_id == Array(*parts[:3], b"other").object_id
