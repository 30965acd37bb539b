"""Labels of clients: format, source, and the selection of clients by label."""

from __future__ import annotations

from pathlib import Path

import pytest
from log_lines import lines_with

from raceme.core import events
from raceme.core.clients import Client
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.labels import Labels, parse_labels, read_labels
from raceme.records.store import read_events
from raceme.runs.experiment import simulate

KITCHEN = {"room": "kitchen", "floor": "1"}


def test_labels_are_short_names_with_values() -> None:
    assert parse_labels("room=kitchen, floor=1") == KITCHEN
    assert parse_labels("") == {}
    for wrong in (
        *("room", "room=", "=kitchen", "1=a", "a b=c", "room=a|b", "room=a,room=b", "room=a,"),
        *("room=a\nb", "room=\x1b[31m", f"room={'x' * 65}", ",".join(f"n{i}=1" for i in range(17))),
    ):
        with pytest.raises(ValueError, match="expected NAME=VALUE"):
            parse_labels(wrong)


def test_a_file_counts_more_than_what_a_client_states(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "labels.toml"
    path.write_text("[c0]\nroom = 'kitchen'\n")
    labels = Labels(path)
    assert labels.of("c0", "room=garden,floor=1") == KITCHEN
    assert labels.of("c1", "room=garden") == {"room": "garden"}
    assert labels.of("c1", "<b>") == labels.of("c1", 7) == {}
    assert "The labels of c1 are ignored: '<b>'" in caplog.text
    assert [line["device"] for line in lines_with(caplog, "are ignored")] == ["c1"]
    path.write_text("[c1]\nroom = 'hall'\n# later\n")
    assert labels.of("c0", "floor=1") == {"floor": "1"}
    assert labels.of("c1", None) == {"room": "hall"}
    path.write_text("[c1\n")
    assert labels.of("c1", None) == labels.of("c1", None) == {"room": "hall"}
    assert caplog.text.count("The former labels stay in use") == 1


@pytest.mark.parametrize(
    ("where", "is_in"),
    [
        ("", True),
        ("room=kitchen", True),
        ("room=garden|kitchen,floor=1", True),
        ("room=kitchen,floor=2", False),
        ("wing=east", False),
        ("group=3", True),
        ("group=0|1", False),
        ("id=c0|c1,floor=1", True),
        ("id=c1 | c0 , floor=1", True),
        ("id=c1", False),
    ],
)
def test_a_condition_names_all_that_must_hold(where: str, is_in: bool) -> None:
    # A label named "id" does not replace the client's id.
    client = Client("c0", 1, group=3, labels=KITCHEN | {"id": "c1"})
    assert Labels(where=where).admit(client) is is_in


def test_a_condition_names_each_label_once() -> None:
    with pytest.raises(UserError, match=r"id stands twice in 'id=c0,id=c1': join its values, id=A"):
        Labels(where="id=c0,id=c1")


def test_an_id_that_no_simulated_client_has_is_reported_at_the_start(tmp_path: Path) -> None:
    keys = {"clients": 4, "max-updates": 4, "out": str(tmp_path / "out")}
    config = RunConfig.from_mapping({**keys, "where": "id=client-1|client-9"})
    with pytest.raises(UserError, match=r"Unknown client in where 'client-9'. .*Valid: client-0, "):
        simulate(config)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("where", ["room", "room=", "=a", "room==a", "room=a|", "room=a,,floor=1"])
def test_an_invalid_condition_is_an_error_at_the_start(where: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"where: .* is not a condition: expected NAME=VALUE"):
        simulate(RunConfig(where=where, out=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("room = 'kitchen'", "room is not a table"),
        ("[c0]\nroom = 'a,b'", "is not a list of labels"),
        ("[c0", ""),
        ("[c0.room]", "is not a text"),
    ],
)
def test_an_invalid_file_of_labels_is_an_error(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "labels.toml"
    path.write_text(content)
    said = rf"labels: .* cannot be read: .*{reason}.*a table for each device"
    with pytest.raises(UserError, match=said):
        read_labels(path)


def run(out: Path, **keys: object) -> list[events.Event]:
    config = {"dataset": "digits", "clients": 4, "max-updates": 8, "workers": 0, "out": str(out)}
    simulate(RunConfig.from_mapping({**config, **keys}))
    return list(read_events(out))


@pytest.mark.parametrize("strategy", ["fedasync", "ifca", "casa"])
def test_a_condition_on_a_label_selects_clients(
    strategy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "labels.toml"
    path.write_text("[client-1]\nroom = 'kitchen'\n[client-2]\nroom = 'kitchen'\n")
    seen = run(tmp_path / "out", strategy=strategy, labels=str(path), where="room=kitchen")
    wanted = {"client-1", "client-2"}
    joined = [event for event in seen if isinstance(event, events.ClientJoined)]
    assert {(event.client, event.labels) for event in joined} == {
        (client, "room=kitchen") for client in wanted
    }
    assert {e.client for e in seen if isinstance(e, events.UpdateApplied)} == wanted
    assert {c for e in seen if isinstance(e, events.Evaluated) for c in e.per_client} == wanted
    assert not [event for event in seen if isinstance(event, events.UpdateRejected)]
    others = lines_with(caplog, "takes no part: it is not room=kitchen")
    assert sorted(line["device"] for line in others) == ["client-0", "client-3"]


def test_clients_of_a_group_of_the_data_are_chosen_alike(tmp_path: Path) -> None:
    keys = {"strategy": "fedasync", "groups": "0.5,0.5"}
    seen = run(tmp_path / "out", where="group=1", **keys)
    joined = [event for event in seen if isinstance(event, events.ClientJoined)]
    assert [event.group for event in joined] == [1, 1]
    # The run ends with a message if no client is selected.
    seen = run(tmp_path / "none", where="group=7", **keys)
    assert isinstance(seen[-1], events.RunEnded)
    assert seen[-1].reason == "no client is group=7"
