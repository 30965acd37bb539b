"""The table "Trust" of docs/security.md: each promise has tests."""

from __future__ import annotations

import ast
import re

import pytest
from processes import ROOT

from raceme.core.registry import CLIENT_WORK

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")

TESTS = {
    "operator of the server": [
        "test_security.py::test_the_page_says_what_every_kind_of_work_reveals",
        "training/test_client_app_privacy.py::test_a_private_device_does_no_work_that_would_tell_more",
        "fleet/test_tasks_trust.py::test_only_the_owner_decides_which_files_are_read",
    ],
    "SuperLink (Flower's)": [
        "core/test_messages_hostile.py::test_an_impossible_reply_is_reported_in_one_short_printable_line",
        "fleet/test_tasks_trust.py::test_what_a_refusal_repeats_of_a_server_is_short_and_printable",
    ],
    "device": [
        "attack/test_attack.py::test_an_attack_breaks_nothing",
        "core/test_messages_hostile.py::test_one_client_does_not_end_a_run_at_its_target",
    ],
    "author of an app that runs on devices": [
        "fleet/test_tasks_trust.py::"
        "test_a_server_cannot_have_a_module_imported_that_the_owner_never_named",
        "fleet/test_tasks_trust.py::"
        "test_client_work_that_a_server_names_is_imported_only_if_the_owner_named_it",
    ],
    "source of data files, checkpoints, configurations, suites": [
        "test_received.py::test_viewing_a_folder_imports_nothing",
        "test_received.py::test_commands_that_need_the_code_name_it",
        "test_received.py::test_no_command_imports",
        "test_received.py::test_a_suite_needs_trust",
        "test_received.py::test_open_work_of_a_checkpoint_needs_trust",
        "test_received.py::test_open_work_of_the_devices_of_up_needs_trust",
        "test_received.py::test_an_archive_is_never_unpickled",
    ],
}
"""Tests that show what each party cannot do."""


def table(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without its header."""
    section = PAGE.partition(f"\n## {heading}\n")[2]
    lines = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_every_party_has_tests() -> None:
    assert [row[0] for row in table("Trust")] == list(TESTS)


@pytest.mark.parametrize("test", [test for tests in TESTS.values() for test in tests])
def test_the_tests_of_each_party_exist(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def test_the_page_says_what_every_kind_of_work_reveals() -> None:
    kinds = {
        kind for row in table("What the server learns") for kind in re.findall("`(.*?)`", row[0])
    }
    # Kinds of work that apply to every client are in the text above the table.
    assert {*CLIENT_WORK} - {"evaluate", "describe"} <= kinds
