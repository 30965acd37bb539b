"""The page's files: constants shared with the plots, and linking into one script."""

from __future__ import annotations

import re

from raceme.reporting import dashboard as page
from raceme.reporting import style


def test_colours_are_those_of_the_plots() -> None:
    text = page.read_asset("colours.js")
    found = re.findall(r'"(#[0-9a-f]{6})"', text[: text.index("SHADES_LIGHT")])
    assert found == [style.NEUTRAL, *style._PALETTE]
    (named,) = re.findall(r"PALETTE.filter\(\(colour\) => !\[(.*?)\]", text)
    left_out = re.findall(r"#[0-9a-f]{6}", named)
    assert tuple(colour for colour in style._PALETTE if colour not in left_out) == style._SERIES
    light = re.search(r"SHADES_LIGHT = \[(.*?)\]", text, re.DOTALL)
    assert light is not None
    assert tuple(re.findall(r"#[0-9a-f]{6}", light[1])) == style._GROUP_SHADES


def test_modules_link_into_one_script_in_the_order_in_which_they_need_each_other() -> None:
    text = page.script()
    modules = re.findall(r'^modules\["([^"]+)"\] = ', text, re.MULTILINE)
    assert modules[-1] == "main.js"
    own = [name for name in page.ASSETS if name.endswith(".js") and not name.startswith("vendor")]
    own.remove("login.js")  # part of the login page only
    assert sorted(modules) == sorted(own)
    for name, needed in re.findall(r'const \{[^}]*\} = modules\["([^"]+)"\]|(\Z)', text):
        assert name in modules or not needed
    assert not re.search(r"^(import|export) ", text, re.MULTILINE)
    # The script is embedded in a page, so it must not contain a closing tag.
    assert "</script" not in text.lower()
    assert "Permission is hereby granted" in text


def test_texts_are_never_markup() -> None:
    for name in page.ASSETS:
        if name.endswith(".js") and not name.startswith("vendor"):
            text = page.read_asset(name)
            assert "innerHTML" not in text
            assert "insertAdjacentHTML" not in text
            assert "eval(" not in text
