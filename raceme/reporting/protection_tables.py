"""What a run's protection did with clients' updates, as tables of its page."""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import median

from raceme.protocol.verdicts import UpdateJudged, Verdict
from raceme.records.record import RunRecord
from raceme.reporting.page import PageTable, number

_MOST_CLIENTS = 200
_MOST_SPELLS = 4
"""So many of a client's exclusions are listed, the last ones."""


def verdicts_table(record: RunRecord) -> PageTable | None:
    """Return the verdicts by reason; None if every update was accepted."""
    kinds: defaultdict[tuple[Verdict, str], list[UpdateJudged]] = defaultdict(list)
    for event in record.judged:
        kinds[event.verdict, event.reason].append(event)
    if not kinds:
        return None
    ranked = sorted(kinds.items(), key=lambda item: -len(item[1]))
    rows = tuple(
        (
            verdict.value,
            reason,
            number(len(found)),
            number(len({event.client for event in found})),
            _typical([event.measured for event in found]),
            _typical([event.bound for event in found]),
        )
        for (verdict, reason), found in ranked
    )
    heads = ("verdict", "reason", "updates", "clients", "median measured", "median bound")
    clients = len({event.client for event in record.judged})
    title = (
        f"{len(record.judged):,} updates of {clients} client{'' if clients == 1 else 's'} "
        "were not simply accepted"
    )
    return PageTable(title, heads, rows, words=(0, 1))


def judged_clients_table(record: RunRecord) -> PageTable | None:
    """Return what became of each client's updates; None if every update was accepted.

    Clients of whom all updates were accepted are left out.
    """
    counts: defaultdict[str, Counter[Verdict]] = defaultdict(Counter)
    for event in record.judged:
        counts[event.client][event.verdict] += 1
    if not counts:
        return None
    applied = Counter(record.updates.client.tolist())
    spells = _exclusions(record)
    worst = sorted(counts, key=lambda client: -counts[client].total())
    rows = tuple(
        (
            client,
            number(applied[client] - counts[client][Verdict.SCALED]),
            number(counts[client][Verdict.SCALED]),
            number(counts[client][Verdict.REFUSED] + counts[client][Verdict.EXCLUDED]),
            _listed(spells[client]),
        )
        for client in worst[:_MOST_CLIENTS]
    )
    more = f", the first {len(rows)} of {len(worst)}" if len(rows) < len(worst) else ""
    heads = ("client", "accepted", "scaled", "refused", "excluded (s)")
    return PageTable(f"Verdicts by client{more}", heads, rows, words=(0, 4))


def _exclusions(record: RunRecord) -> defaultdict[str, list[tuple[float, float | None]]]:
    """Return from when until when each client was excluded; None: until the end."""
    spells: defaultdict[str, list[tuple[float, float | None]]] = defaultdict(list)
    for event in record.judged:
        own = spells[event.client]
        if event.verdict is Verdict.EXCLUDED:
            own.append((event.time, None))
        elif event.verdict is Verdict.READMITTED and own:
            own[-1] = (own[-1][0], event.time)
    return spells


def _listed(spells: list[tuple[float, float | None]]) -> str:
    texts = [
        f"from {number(float(start), 1)}"
        + (" to the end" if end is None else f" to {number(float(end), 1)}")
        for start, end in spells[-_MOST_SPELLS:]
    ]
    before = [f"{len(spells) - _MOST_SPELLS} times before"] if len(spells) > _MOST_SPELLS else []
    return ", ".join([*before, *texts]) or "–"


def _typical(values: list[float]) -> str:
    """Return the median of those that are known."""
    known = [float(value) for value in values if value == value]
    return f"{median(known):.3g}" if known else "–"
