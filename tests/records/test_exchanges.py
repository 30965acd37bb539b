"""Work and waiting times of clients, and the clients that caused them: worked out by hand."""

import csv
import math
from pathlib import Path

import pytest

from raceme.core.errors import UserError
from raceme.core.timeline import Exchange, Switched
from raceme.records.exchanges import (
    CLIENTS,
    ExchangeLog,
    FleetRecord,
    read_fleet,
    write_accounts,
)
from raceme.records.folder import MESSAGES, SUMMARY
from raceme.records.summary import write_summary

A, B, C = 1, 2, 3
NAMES = {A: "a", B: "b", C: "c"}


def exchange(
    number: int, node: int, sent: float, begun: float, ended: float, **other: object
) -> Exchange:
    values = {"kind": "train", "answered": ended, "failure": None, "bytes_down": 10, "bytes_up": 1}
    values |= other
    return Exchange(number, node, sent=sent, begun=begun, ended=ended, **values)  # type: ignore[arg-type]


ROUNDS = (
    exchange(0, A, 0, 0, 2),
    exchange(1, B, 0, 0, 4),
    # An exchange without duration only counts as a message.
    exchange(2, A, 4, 4, 4, kind="evaluate"),
    exchange(3, A, 4, 4, 6),
    exchange(4, C, 4, 4, 10),
)


def fleet_of(tmp_path: Path, end: float, *happenings: Exchange | Switched) -> FleetRecord:
    with ExchangeLog(tmp_path / MESSAGES, NAMES, online=NAMES) as log:
        for happening in happenings:
            log.observe(happening)
        return log.fleet(end)


def held_up(fleet: FleetRecord) -> dict[str, float]:
    return {account.client: account.held_up for account in fleet.accounts()}


def test_rounds_wait_for_the_slowest(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, 10.0, *ROUNDS)
    assert fleet.moments().tolist() == [0, 4, 10]
    assert fleet.awaited() == [[], ["b"], ["c"]]
    a, b, c = fleet.accounts()
    assert (a.messages, a.tasks, a.failures, a.bytes_down, a.bytes_up) == (3, 2, 0, 30, 3)
    # a waits for b from 2 to 4 and for c from 6 to 10, b for c from 4 on, and c for b until 4.
    assert [account.busy for account in (a, b, c)] == [4, 4, 6]
    assert [account.idle for account in (a, b, c)] == [6, 6, 4]
    assert [account.held_up for account in (a, b, c)] == [0, 2 + 4, 4 + 6]
    # Without waiting: two tasks in 4 s, one in 4 s and one in 6 s; in parallel 11 in 12 s.
    assert fleet.without_waiting() == pytest.approx(4 / (11 / 12))


def test_a_long_wait_is_for_several_one_after_the_other(tmp_path: Path) -> None:
    fleet = fleet_of(
        tmp_path, 6.0, exchange(0, A, 0, 0, 2), exchange(1, A, 2, 2, 5), exchange(2, B, 5, 5, 6)
    )
    # b waits for a until 5; c all the time, at the end for b.
    assert held_up(fleet) == {"a": 5 + 5, "b": 1 + 1, "c": 0}


def test_those_who_come_at_the_same_time_share_the_blame(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, 4.0, exchange(0, A, 0, 0, 4), exchange(1, B, 0, 0, 4))
    assert held_up(fleet) == {"a": 2, "b": 2, "c": 0}


def test_nobody_is_waited_for_while_all_are_at_work(tmp_path: Path) -> None:
    fleet = fleet_of(
        tmp_path,
        4.0,
        exchange(0, A, 0, 0, 2),
        exchange(1, B, 0, 0, 3),
        exchange(2, C, 0, 0, 4),
        exchange(3, A, 2, 2, 4),
    )
    # b has no more work from 3 on, and waits for a and c.
    assert fleet.moments().tolist() == [0, 2, 4]
    assert fleet.awaited() == [[], [], ["c", "a"]]
    assert held_up(fleet) == {"a": 0.5, "b": 0, "c": 0.5}


def test_a_client_that_was_given_up_was_waited_for(tmp_path: Path) -> None:
    fleet = fleet_of(
        tmp_path,
        20.0,
        exchange(0, A, 0, 0, 2),
        exchange(1, B, 0, 0, 1, failure="lost", answered=math.inf),
        # After a timeout the server continues, and later pauses: no client is the cause.
        exchange(2, A, 10, 10, 12),
        exchange(3, A, 15, 15, 20),
    )
    assert fleet.awaited() == [[], ["b"], [], ["a"]]
    waits_for_b = (10 - 2) + (10 - 1) + 10
    assert held_up(fleet) == {"a": 5 + 5, "b": waits_for_b, "c": 0}
    assert [account.failures for account in fleet.accounts()] == [0, 1, 0]


def test_an_offline_client_does_not_wait(tmp_path: Path) -> None:
    fleet = fleet_of(
        tmp_path,
        10.0,
        Switched(C, 1, online=False),
        Switched(A, 3, online=False),
        exchange(0, A, 0, 0, 3, failure="the device went offline", answered=8),
        Switched(C, 4, online=True),
        exchange(1, B, 0, 0, 10),
    )
    assert fleet.offline == {"c": [(1, 4)], "a": [(3, 10)]}
    a, b, c = fleet.accounts()
    assert (a.busy, a.idle, a.offline) == (3, 0, 7)
    assert (b.busy, b.idle, b.offline) == (10, 0, 0)
    assert (c.busy, c.idle, c.offline) == (0, 7, 3)
    with ExchangeLog(tmp_path / "late.csv", NAMES, online=[A, B]) as log:
        assert log.fleet(5.0).offline == {"c": [(0, 5)]}


def test_work_that_is_cut_off_counts_until_the_end(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, 5.0, exchange(0, A, 0, 0, 9, answered=math.inf))
    assert fleet.busy()["a"] == [(0, 5)]
    # The full duration of the task is unknown.
    assert fleet.without_waiting() == 0
    assert fleet.accounts()[0].idle == 0


def test_a_run_without_events_has_no_waiting(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, 0.0)
    assert fleet.without_waiting() == 0
    assert [account.idle for account in fleet.accounts()] == [0, 0, 0]


def test_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    failure = "ValueError: no\nTraceback ...\n"
    lost = exchange(5, B, 4, 4, 5, failure=failure, answered=math.inf)
    fleet = fleet_of(tmp_path, 10.0, *ROUNDS[::-1], lost, Switched(C, 9, online=False))
    write_accounts(tmp_path / CLIENTS, fleet.accounts())
    offline = {client: list(map(list, spans)) for client, spans in fleet.offline.items()}
    write_summary(tmp_path / SUMMARY, {"virtual_time": 10.0, "offline": offline})
    again = read_fleet(tmp_path)
    # Only the first line of a failure is kept.
    assert again.tasks[:-1] == fleet.tasks[:-1]
    assert again.tasks[-1].failure == "ValueError: no"
    assert again.accounts() == fleet.accounts()
    with (tmp_path / CLIENTS).open(newline="") as file:
        assert [row["client"] for row in csv.DictReader(file)] == ["a", "b", "c"]
    (tmp_path / SUMMARY).write_text("{}")
    with pytest.raises(UserError, match="damaged"):
        read_fleet(tmp_path)
    (tmp_path / MESSAGES).unlink()
    (tmp_path / SUMMARY).unlink()
    with pytest.raises(UserError, match="Cannot read"):
        read_fleet(tmp_path)


def fail(path: Path) -> None:
    with ExchangeLog(path, NAMES, online=NAMES) as log:
        log.observe(ROUNDS[0])
        raise UserError("impossible")


def test_an_error_of_the_users_leaves_no_messages(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        fail(tmp_path / MESSAGES)
    assert not (tmp_path / MESSAGES).exists()
