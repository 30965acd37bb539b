"""Plays attacks for some minutes, or repeats one of them."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from .case import Case, Count, play
from .categories import CATEGORIES


def main() -> int:
    """Play cases until the time is over; return 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case of each kind")
    parser.add_argument("--only", help="one category: " + ", ".join(CATEGORIES))
    parser.add_argument("--case", help="one case again: CATEGORY/SUBJECT/SEED")
    options = parser.parse_args()
    logging.getLogger("raceme").addHandler(logging.NullHandler())
    logging.getLogger("raceme").propagate = False
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    if options.case:
        name, _, rest = options.case.partition("/")
        subject, _, seed = rest.rpartition("/")
        finding = Case(CATEGORIES[name], subject, int(seed)).play()
        print(finding or "Nothing is broken.")
        return bool(finding)
    names = [options.only] if options.only else list(CATEGORIES)
    counts = {name: Count() for name in names}
    until = time.monotonic() + 60 * options.minutes
    kinds: set[str] = set()
    while time.monotonic() < until:
        name = next_category(counts)
        category, played = CATEGORIES[name], counts[name].cases
        seed, index = divmod(played, len(category.subjects))
        case = Case(category, category.subjects[index], options.seed + seed)
        finding = play(case, counts[name])
        # Similar findings differ in numbers only: one of each kind is shown.
        kind = finding.strip().rsplit("\n", 1)[-1][:60]
        if finding and kind not in kinds:
            kinds.add(kind)
            print(f"FOUND by {case.name}:\n{finding}", flush=True)
    return _report(counts)


def next_category(counts: dict[str, Count]) -> str:
    """Return the category that has used the least of its share of the time."""
    return min(counts, key=lambda name: counts[name].seconds / CATEGORIES[name].share)


def _report(counts: dict[str, Count]) -> int:
    print(f"{'category':<14}{'cases':>8}{'found':>8}{'seconds':>9}")
    for name, count in counts.items():
        print(f"{name:<14}{count.cases:>8}{count.found:>8}{count.seconds:>9.1f}")
    for name in (name for name, count in counts.items() if not count.cases):
        print(f"The time was over before {name} had its first case: give more --minutes.")
    cases, found = (sum(getattr(c, key) for c in counts.values()) for key in ("cases", "found"))
    print(f"{'all':<14}{cases:>8}{found:>8}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
