"""A folder, suite or archive from others runs no code unless the user trusts it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import click
import numpy as np
import pytest
import tomli_w
import typer
from flwr.app import ConfigRecord, Message, RecordDict
from processes import free_port, loopback
from processes import raceme as as_command
from typer.testing import CliRunner

import raceme
from raceme.cli import COMMANDS, app
from raceme.core.config import TRUST, general_keys, keys_to_resume, read_toml, registry_of
from raceme.core.errors import UserError
from raceme.core.options import is_path
from raceme.fleet import testbed
from raceme.fleet.serve import ServeOptions, prepare, serve
from raceme.flower.link_state import head_of
from raceme.flower.messages import encode, set_message_id
from raceme.records.folder import COMPARISON
from raceme.runs.checkpoints import read_tree, write_tree
from raceme.simulation.executor import Packed, pack, unpack

FOLDER = "inbox/from-a-colleague"
PACKAGE = FOLDER.replace("/", ".")
CONFIG_FILE, SUITE = f"{FOLDER}/config.toml", f"{FOLDER}/suite.toml"
CODE = f"{PACKAGE}.pwn:hit"
"""Code in the folder, which can be imported as a package, also with dashes in its name."""

PWN = """
from pathlib import Path
Path({mark!r}).touch()
def hit(*given, **named):
    raise SystemExit
"""

KEYS = sorted(key for key in general_keys() if registry_of(key) is not None)
"""Keys whose values may name code."""

TINY = ["--clients", "2", "--workers", "0"]
LIMIT = ["--max-updates", "4"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and a comparison that only use Raceme's own names."""
    here = tmp_path_factory.mktemp("made")
    before = Path.cwd()
    os.chdir(here)
    try:
        run = [*TINY, *LIMIT, "--set", "checkpoint-every=2", "--client-models"]
        ran(["run", "--strategy", "fedasync", *run, "--out", FOLDER])
        ran(["compare", "fedasync", *TINY, *LIMIT, "--processes", "1", "--out", "compared"])
    finally:
        os.chdir(before)
    return here


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy as the working folder, with a module that leaves a file when it is imported."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    source = PWN.format(mark=str(tmp_path / "mark"))
    # Importing the module would also run its packages.
    for path in (f"{FOLDER}/pwn.py", f"{FOLDER}/__init__.py", "compared/pwn.py"):
        (tmp_path / path).write_text(source)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(("inbox", "compared"))]:
        del sys.modules[name]


def ran(arguments: list[str]) -> str:
    """Return the standard output and standard error of a command."""
    done = CliRunner().invoke(app, arguments)
    error = done.exception
    if isinstance(error, UserError):
        return f"{done.output}{error}"
    if isinstance(error, SystemExit | None):
        return done.output
    raise error


def name_code(file: str, *keys: str) -> None:
    """Replace keys of a configuration by the name of the module."""
    path = Path(file)
    path.write_text(tomli_w.dumps(read_toml(path) | dict.fromkeys(keys, CODE)))


def refused(here: Path, said: str) -> bool:
    """Return whether a command was refused with a line that names the import."""
    assert not (here / "mark").exists(), said
    line = said.splitlines()[-1]
    where = here / FOLDER
    return f"{CODE} ({where}/__init__.py and {where}/pwn.py). Nothing was imported." in line


# -----------------------------------------------------------------------------
# Every key that may name code.
# -----------------------------------------------------------------------------


def test_the_keys_that_may_name_code_are_found() -> None:
    assert {"strategy", "dataset", "model", "partition", "drift", "devices"} <= {*KEYS}
    assert {"protection", "attack"} <= {*KEYS}


@pytest.mark.parametrize("key", KEYS)
def test_viewing_a_folder_imports_nothing(key: str, here: Path) -> None:
    name_code(CONFIG_FILE, key)
    assert ran(["report", FOLDER]) == f"{FOLDER}/report.html\n"
    assert CODE in (here / FOLDER / "report.html").read_text()
    run = raceme.open(FOLDER)
    assert len(run.clients) == 2
    assert run.config[key] == CODE
    assert not (here / "mark").exists()


@pytest.mark.parametrize("key", KEYS)
def test_commands_that_need_the_code_name_it(key: str, here: Path) -> None:
    name_code(CONFIG_FILE, key)
    for command in (["run", "--resume", FOLDER], ["run", "--config", CONFIG_FILE]):
        said = ran([*command, "--max-updates", "8"])
        assert refused(here, said)
        assert f"or name it again: --{key} {CODE}." in said
    assert "add --trust inbox/from-a-colleague, or name" in said
    for command in (["serve", "--out", "served"], ["up"]):
        assert refused(here, ran([*command, "--config", CONFIG_FILE]))
    with pytest.raises(UserError) as told:
        raceme.run(resume=FOLDER)
    assert refused(here, str(told.value))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("how", ["trust", "name"])
def test_the_user_decides(key: str, how: str, here: Path) -> None:
    name_code(CONFIG_FILE, key)
    allowed = ["--trust", "inbox"] if how == "trust" else [f"--{key}", CODE]
    ran(["run", "--config", CONFIG_FILE, "--out", "again", *allowed])
    assert (here / "mark").exists()


def test_trust_says_what_is_imported(here: Path) -> None:
    name_code(CONFIG_FILE, "model")
    told = ran(["run", "--resume", FOLDER, "--max-updates", "8", "--trust", FOLDER])
    said = f"Importing what {FOLDER}/config.toml names: model {CODE} ({here / FOLDER}/__init__.py"
    assert said in told


@pytest.mark.parametrize("other", ["compared", f"{FOLDER}/clusters", "inbox/from", "nowhere"])
def test_trust_is_of_one_folder(other: str, here: Path) -> None:
    name_code(CONFIG_FILE, "model")
    assert refused(here, ran(["run", "--resume", FOLDER, "--trust", other]))


@pytest.mark.parametrize(
    "keys",
    [
        {"set": f"strategy={CODE}"},
        {"set": f"seed=3 'model={CODE}'"},
        {"strategy": f" {CODE} "},
        {"strategy": CODE, "trust": "/"},
        {"set": f"trust=/ strategy={CODE}"},
    ],
)
def test_a_file_cannot_hide_a_name_or_trust_itself(keys: dict[str, str], here: Path) -> None:
    path = here / FOLDER / "config.toml"
    path.write_text(tomli_w.dumps(read_toml(path) | keys))
    for command in (["run", "--resume", FOLDER], ["run", "--config", str(path)]):
        said = ran(command)
        assert ("sets trust, which only the command line may set" in said) == ("trust" in str(keys))
        assert "trust" in str(keys) or "Nothing was imported" in said
        assert not (here / "mark").exists()


def test_a_run_that_stays_records_no_trust(here: Path) -> None:
    ran(["run", *TINY, *LIMIT, "--trust", ".", "--out", "trusting"])
    assert TRUST not in read_toml(here / "trusting" / "config.toml")


# -----------------------------------------------------------------------------
# Every command.
# -----------------------------------------------------------------------------


def commands() -> dict[str, click.Command]:
    """Return every command as its words."""
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    context = click.Context(group)
    found: dict[str, click.Command] = {}
    for name in COMMANDS:
        _, command, _ = group.resolve_command(context, [name])
        assert command is not None
        inner = command.commands if isinstance(command, click.Group) else {}
        found |= {f"{name} {word}": part for word, part in inner.items()} or {name: command}
    return found


def lines() -> list[list[str]]:
    """Return a command line for every argument or option of a command that takes a path."""
    found = []
    paths = {f"--{key}" for key, item in general_keys().items() if is_path(item)}
    for words, command in commands().items():
        needed = [item for item in command.params if item.required]
        limit = LIMIT if any("--config" in item.opts for item in command.params) else []
        for item in command.params:
            # Keys of a run behave the same in all commands, so they are tested with `run` only.
            is_key = item.opts[0] in paths and (words == "run" or "--resume" in item.opts)
            if not (isinstance(item.type, click.Path) or is_key):
                continue
            is_file = "TOML" in (getattr(item, "help", "") or "")
            for value in (FOLDER, *((CONFIG_FILE, SUITE) if is_file else ())):
                line = words.split()
                for other in {item: 0} | dict.fromkeys(needed):
                    is_option = isinstance(other, click.Option)
                    typed = value if isinstance(other.type, click.Path) or other is item else ""
                    line += [other.opts[-1]] if is_option else []
                    line += [typed or ("127.0.0.1:1" if is_option else "casa")]
                found.append([*line, *limit])
    return found


LINES = lines()
LASTING = ("watch", "serve", "device", "up")
"""Commands that run until they are stopped."""


def everything(here: Path) -> None:
    """Let every file of a received folder name the module."""
    name_code(CONFIG_FILE, *KEYS)
    method: dict[str, Any] = {"strategy": CODE}
    shared = dict.fromkeys({*KEYS} - {"strategy"}, CODE)
    suite = {"methods": {"hit": method | {"settings": shared}}, "settings": shared}
    (here / SUITE).write_text(tomli_w.dumps(suite))


def test_the_command_lines_are_found() -> None:
    words = {line[0] for line in LINES}
    assert {"run", "compare", "report", "export", "serve", "watch", "simulate"} <= words
    for needed in ("report", "export", "watch"):
        assert [needed, FOLDER] in LINES
    assert ["run", "--resume", FOLDER, *LIMIT] in LINES
    assert ["compare", "--suite", SUITE, *LIMIT] in LINES


@pytest.mark.parametrize(
    "line", [line for line in LINES if line[0] not in LASTING], ids=lambda line: " ".join(line)
)
def test_no_command_imports(line: list[str], here: Path) -> None:
    everything(here)
    keys = TINY if line[0] == "run" else []
    done = CliRunner().invoke(app, [*line, *keys])
    assert isinstance(done.exception, UserError | SystemExit | None)
    assert not (here / "mark").exists()


@pytest.mark.parametrize(
    "line", [line for line in LINES if line[0] in LASTING], ids=lambda line: " ".join(line)
)
def test_no_lasting_command_imports(line: list[str], here: Path) -> None:
    everything(here)
    further = {"watch": ["--port", "0"], "device": ["--insecure"]}.get(line[0], [])
    if line[0] == "device" and {"--key", "--root-certificates"} & {*line}:
        further = []
    if line[0] in ("serve", "device"):
        further += ["--log-format", "text"]
    if line[0] == "serve":
        further += ["--address", "127.0.0.1:0"] if "--address" not in line else []
    with loopback(here) as net:
        process = net.start("command", as_command(*line, *further))
        # Waits for a page's address, a device's first attempt to connect, or the refusal.
        process.wait_for(r"http://|Ctrl-C|cannot be reached|raceme: .*\n|\n")
    assert not (here / "mark").exists()


@pytest.mark.parametrize("folder", [FOLDER, "compared", "inbox"])
def test_the_dashboard_reads_text(folder: str, here: Path) -> None:
    everything(here)
    for config in (here / "compared").glob("*/*/config.toml"):
        config.write_text(tomli_w.dumps(read_toml(config) | dict.fromkeys(KEYS, CODE)))
    with loopback(here) as net:
        watching = net.start("watch", as_command("watch", folder, "--port", "0"))
        address = watching.wait_for(r"http://[\w.:]+/")[0]
        with urlopen(address) as page:
            assert b"<html" in page.read()
        with urlopen(f"{address}events") as events:
            assert next(line for line in events if line.startswith(b"data:"))
    assert not (here / "mark").exists()


# -----------------------------------------------------------------------------
# Suites, comparisons, checkpoints and archives.
# -----------------------------------------------------------------------------


COMPARE = ["compare", "--suite", SUITE, *TINY, *LIMIT, "--processes", "1", "--out", "out"]


def write_suite(here: Path, tree: dict[str, Any]) -> None:
    (here / SUITE).write_text(tomli_w.dumps(tree))


@pytest.mark.parametrize(
    "tree",
    [
        {"methods": {"hit": {"strategy": CODE}}},
        {"methods": {CODE: {}}},
        {"methods": {"fedasync": {}}, "settings": {"model": CODE}},
        {"methods": {"fedasync": {}}, "settings": {"set": f"drift={CODE}"}},
        {"methods": {"fedasync": {"settings": {"attack": CODE}}}},
        {"extends": "base.toml"},
        {
            "methods": {"fedasync": {}},
            "axes": {"kind": {"evil": {"settings": {"dataset": CODE}}}},
            "variants": {"one": {"kind": "evil"}},
        },
    ],
    ids=["method", "label", "settings", "set", "method settings", "base", "axis"],
)
def test_a_suite_needs_trust(tree: dict[str, Any], here: Path) -> None:
    base = {"methods": {"hit": {"strategy": CODE}}}
    (here / FOLDER / "base.toml").write_text(tomli_w.dumps(base))
    write_suite(here, tree)
    said = ran(COMPARE)
    assert refused(here, said)
    assert f"add --trust {SUITE}" in said
    ran([*COMPARE, "--trust", FOLDER])
    assert (here / "mark").exists()


def test_a_suite_cannot_trust_itself(here: Path) -> None:
    for tree in (
        {"methods": {"hit": {"strategy": CODE}}, "settings": {"trust": "/"}},
        {"methods": {"hit": {"strategy": CODE, "settings": {"trust": "/"}}}},
    ):
        write_suite(here, tree)
        assert (
            "Nothing was imported" in (said := ran(COMPARE))
            or "only the command line may set" in said
        )
        assert not (here / "mark").exists()


def test_the_user_names_what_a_suite_names(here: Path) -> None:
    write_suite(here, {"methods": {CODE: {}, "fedasync": {}}, "settings": {"model": CODE}})
    assert refused(here, ran([*COMPARE, CODE]))
    assert refused(here, ran([*COMPARE, "--model", "mclr"]))
    assert "fedasync" in ran([*COMPARE, "fedasync", "--model", "mclr", "--trust", SUITE])
    assert not (here / "mark").exists()
    ran([*COMPARE, CODE, "--model", "mclr"])
    assert (here / "mark").exists()


def test_a_comparison_is_read_as_text(here: Path) -> None:
    path = here / "compared" / COMPARISON
    tree = json.loads(path.read_text())
    code = CODE.replace(PACKAGE, "compared")
    tree["methods"][0]["strategy"] = code
    tree["settings"] |= dict.fromkeys(KEYS, code)
    path.write_text(json.dumps(tree))
    run = next((here / "compared").glob("*/seed-0"))
    config = run / "config.toml"
    config.write_text(tomli_w.dumps(read_toml(config) | dict.fromkeys(KEYS, code)))
    assert ran(["report", "compared", "--latex"]).endswith("compared/report.html\n")
    found = raceme.open("compared")
    assert len(found.rows) == 1
    assert found.results.results[0].method.asynchronous
    assert code in (here / "compared" / "report.html").read_text()
    # A comparison that would keep these runs imports no code either.
    compared = ["compare", "fedasync", *TINY, *LIMIT, "--processes", "1", "--out", "compared"]
    assert f"holds a finished run with strategy = '{code}', wanted is 'fedasync'" in ran(compared)
    del tree["methods"][0]["asynchronous"]
    path.write_text(json.dumps(tree))
    assert "is not what `raceme compare` writes: KeyError 'asynchronous'" in ran(
        ["report", "compared"]
    )
    assert not (here / "mark").exists()


@pytest.mark.parametrize("setting", ["kind", "completed-by"])
def test_open_work_of_a_checkpoint_needs_trust(setting: str, here: Path) -> None:
    (path, *_) = sorted((here / FOLDER / "checkpoint").iterdir(), reverse=True)
    tree, note = read_tree(path)
    assert tree["grid"]["pending"], "clients are at work"
    for pending in tree["grid"]["pending"]:
        content = unpack(Packed(**pending["message"]["content"]))
        content["config"] = ConfigRecord({**content["config"], setting: CODE})
        pending["message"]["content"] = pack(content)._asdict()
    write_tree(path, tree, note)
    resume = ["run", "--resume", FOLDER, "--max-updates", "8"]
    said = ran(resume)
    assert refused(here, said)
    assert said.endswith(f"If you trust it, add --trust {here / FOLDER}.")
    assert refused(here, ran([*resume, "--trust", f"{FOLDER}/clusters"]))
    ran([*resume, "--trust", FOLDER])
    assert (here / "mark").exists() == (setting == "kind")


def test_open_work_of_the_devices_of_up_needs_trust(here: Path) -> None:
    keys = {"strategy": "fedasync", "clients": 2, "out": "served"}
    options = ServeOptions(f"127.0.0.1:{free_port()}", metrics="off")
    serve(prepare(keys), options, stop=lambda: "enough")
    (path, *_) = sorted((here / "served" / "checkpoint").glob("*.safetensors"), reverse=True)
    tree, note = read_tree(path)
    asked = Message(RecordDict({"config": ConfigRecord({"kind": CODE})}), 7, "train")
    set_message_id(asked, "a" * 64)
    whole = {"delivered": "", "whole": False, "body": encode(asked), "parcel": [head_of(asked)]}
    tree["grid"]["state"]["messages"] = [whole]
    write_tree(path, tree, note)
    resume = {"clients": 2, "resume": "served", "max-updates": 4}
    said = ran(
        ["up", *(word for key, value in resume.items() for word in (f"--{key}", str(value)))]
    )
    assert refused(here, said)
    assert said.endswith(f"If you trust it, add --trust {here / 'served'}.")
    # Only prepares the run, without starting its server and devices.
    typed = {**resume, "trust": "."}
    config = testbed.prepare({**keys_to_resume("served", typed), **typed})
    assert config.out == str(here / "served")


def test_an_archive_is_never_unpickled(here: Path) -> None:
    class Hit:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (here / "mark",)

    hit = np.array([Hit()], dtype=object)
    np.savez(here / "hit.npz", x=hit, y=hit)
    (here / "hits").mkdir()
    shutil.copy(here / "hit.npz", here / "hits")
    run = ["run", *TINY, *LIMIT]
    for data in (
        ["--dataset", "npz", "--set", "data-file=hit.npz"],
        ["--dataset", "npz-folder", "--data-root", "hits"],
        ["--proxy", "hits"],
    ):
        assert "Results" not in ran([*run, *data])
    pickled = pickle.dumps(Hit())
    for path in (*(here / FOLDER).glob("c*/*.safetensors"), here / FOLDER / "similarity.npz"):
        path.write_bytes(pickled)
    ran(["report", FOLDER])
    ran(["export", FOLDER])
    ran(["run", "--resume", FOLDER, "--max-updates", "8"])
    assert not (here / "mark").exists()
    pickle.loads(pickled)
    assert (here / "mark").exists()
