"""Pages of the site that are written from elsewhere: its home page, and the page of the keys."""

from __future__ import annotations

import posixpath
import re
from typing import Any

from mkdocs.structure.files import File

from raceme.core.config import RunConfig, all_keys
from raceme.core.limits import Limits
from raceme.core.options import Key
from raceme.core.training_settings import TrainingOptions

LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]*)[^)]*\)")
"""A link from a page to another file of the checkout."""


_TOPICS = ("Run", "Local training", "Limits and evaluations", "Features")
"""Headings of the keys that every run has."""


def _topic(name: str, key: Key) -> str:
    """Return the heading of a key: its method, the kinds of its readers, or a topic of the run."""
    method = name.rpartition(".")[0]
    if method or key.readers:
        return method or " and ".join(f"{kind}s" for kind in key.readers).capitalize()
    run, training, limits, features = _TOPICS
    if key.item.name in Limits.__annotations__:
        return limits
    if key.item.name in TrainingOptions.__annotations__:
        return training
    return run if key.item.name in RunConfig.__annotations__ else features


def keys_page() -> str:
    """Return what ``raceme list --keys`` lists as Markdown, a table for each topic."""
    groups: dict[str, list[str]] = {topic: [] for topic in _TOPICS}
    for name, key in all_keys().items():
        group = _topic(name, key)
        readers = [] if "." in name else [", ".join(names) for names in key.readers.values()]
        meaning = f"{key.help} ({'; '.join(readers)})" if readers else key.help
        default = "empty" if key.default == "" else str(key.default)
        default = default.lower() if isinstance(key.default, bool) else default
        cells = (f"`{name}`", meaning, key.type, key.unit or "–", f"`{default}`")
        row = " | ".join(cell.replace("|", r"\|").replace("<", "&lt;") for cell in cells)
        groups.setdefault(group, []).append(f"| {row} |")
    # Topics of every run, then those of its parts in capitals, then methods.
    rest = sorted(set(groups) - set(_TOPICS), key=lambda group: (group[0].islower(), group))
    ordered = (*_TOPICS, *rest)
    head = "| key | meaning | type | unit | default |\n|---|---|---|---|---|\n"
    tables = [f"## {group}\n\n{head}" + "\n".join(groups[group]) for group in ordered]
    return (
        "# Keys\n\nEach key is an option (`--lr 0.1`), an assignment (`--set lr=0.1`), a line of a "
        "TOML file (`--config`), and an argument in Python (`lr=0.1`). `raceme list --keys WORD` "
        "lists those with a word. Keys of a method follow those of a run.\n\n"
        '<input id="keys-filter" type="search" placeholder="Filter, e.g. staleness" '
        'aria-label="Filter keys" class="md-input">\n\n' + "\n\n".join(tables) + "\n"
    )


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that have no file of their own in ``docs``."""
    root = config.config_file_path.rpartition("/")[0]
    with open(f"{root}/README.md", encoding="utf-8") as file:
        home = file.read()
    home = re.sub(r"\]\(docs/", "](", home)
    # What is not a page of the site stays as a name, or as a badge.
    home = re.sub(r"\[(!\[[^\]]*\]\([^)]*\))\]\((?!https?:)[^)]*\)", r"\1", home)
    home = re.sub(r"\[([^\]]*)\]\((?!https?:|#|[\w/-]+\.md|images/)[^)]*\)", r"\1", home)
    home = re.sub(r"\[([^\]]*)\]\([A-Z]+\.md\)", r"\1", home)
    files.append(
        File.generated(config, "index.md", content=f"---\nhide: [navigation]\n---\n{home}")
    )
    files.append(File.generated(config, "keys.md", content=keys_page()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Name the files of the checkout that the site does not contain, instead of linking them."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def named(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        is_in_site = path.startswith("docs/") and not path.endswith(".json")
        return link[0] if is_in_site else f"{link[1]} (`{path}`)"

    return LINK.sub(named, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Drop the roles of Sphinx, which docstrings have before a name."""
    return re.sub(r":(?:mod|class|data|func|meth):(?=<code>)", "", html)
