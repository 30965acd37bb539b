"""Count the words of the pages, without the marks of tables: ``python docs/words.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parent
RESEARCH = ("results*.md", "research/*.md", "performance.md")


def count(page: Path) -> int:
    """Return the number of words of a page, code included: what has a letter or a digit."""
    return sum(any(map(str.isalnum, word)) for word in page.read_text(encoding="utf-8").split())


def user_pages(docs: Path = DOCS) -> Iterator[tuple[str, int]]:
    """Yield the pages of guide and reference with their words; research is apart."""
    for page in sorted(docs.rglob("*.md")):
        if not any(page.match(pattern) for pattern in RESEARCH):
            yield page.relative_to(docs).as_posix(), count(page)


if __name__ == "__main__":
    for name, words in (counted := list(user_pages())):
        print(f"{words:7,}  {name}")
    print(f"{sum(words for _, words in counted):7,}  in total")
