"""Events as columns: each number worked out by hand."""

from __future__ import annotations

import base64
import json
import math

import numpy as np
import pytest

from raceme.core.events import (
    ACCURACY,
    ClientJoined,
    ClientLeft,
    ClusterChange,
    ClustersChanged,
    DataChanged,
    Evaluated,
    Measure,
    RunEnded,
    UpdateApplied,
    UpdateJudged,
    UpdateRejected,
    Verdict,
)
from raceme.reporting.dashboard.source import Columns, as_json

HOSTILE = "\u202e<img src=x onerror=alert(1)>" + "x" * 98


def columns() -> Columns:
    return Columns(most_scores=1000)


def joined(client: str, time: float = 0.0, group: int | None = 0) -> ClientJoined:
    return ClientJoined(time, client, 0, 12, group)


def test_updates_are_columns_and_clients_numbers() -> None:
    found = columns()
    found.observe(joined("a"))
    found.observe(joined("b"))
    found.observe(UpdateApplied(1, 2.0, "b", 3, 0, 4, 0.25, 0.5, math.nan, 8, 8))
    told = found.take()
    assert told["clients"] == {"name": ["a", "b"]}
    assert told["updates"] == {
        "time": [2.0],
        "sent": [0.5],
        "client": [1],
        "cluster": [3],
        "staleness": [4],
        "weight": [0.25],
        "loss": [None],
    }
    assert told["now"] == 2.0
    assert found.take() == {}


def test_a_task_has_the_colour_of_the_cluster_that_it_was_sent_for() -> None:
    found = Columns(1000)
    one, other = {"a": {0: 1.0}}, {"a": {3: 1.0}}
    found.observe(ClustersChanged(0.0, 0, ClusterChange.ASSIGN, one, made=(0,)))
    found.observe(ClustersChanged(5.0, 1, ClusterChange.SPLIT, other, (0,), (3,)))
    # A slow device's task was sent before the split, so it belongs to the parent cluster.
    for seq, (sent, time) in enumerate([(1.0, 6.0), (6.5, 8.0)], 1):
        found.observe(UpdateApplied(seq, time, "a", 3, 0, 0, 0.5, sent, 1.0, 8, 8))
    assert found.take()["updates"]["cluster"] == [0, 3]


def test_evaluations_have_means_of_clusters_the_worst_tenth_and_everybody() -> None:
    found = columns()
    scores = {"a": (1, 0.5, 0.0), "b": (1, 1.0, 0.0), "c": (2, 0.75, 0.0)}
    found.observe(Evaluated(3.0, 7, 0.75, 0.4, 2, scores, asked=4))
    told = found.take()["evaluations"]
    # 0.75 is the mean of 0.5 and 1; the worst tenth of three is one client.
    assert told["clusters"] == [[(1, 2, 0.75), (2, 1, 0.75)]]
    assert told["worst"] == [0.5]
    assert (told["asked"], told["answered"], told["updates"]) == ([4], [3], [7])
    (text,) = told["scores"]
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == [0.5, 1.0, 0.75]


def test_a_client_that_did_not_answer_has_no_score() -> None:
    found = columns()
    found.observe(joined("a"))
    found.observe(joined("b"))
    found.observe(Evaluated(3.0, 7, 0.5, 0.4, 1, {"b": (0, 0.5, 0.0)}))
    (text,) = found.take()["evaluations"]["scores"]
    values = np.frombuffer(base64.b64decode(text), "<f4")
    assert math.isnan(values[0])
    assert values[1] == 0.5


def test_of_too_many_scores_fewer_evaluations_tell_them() -> None:
    found = Columns(most_scores=4)
    for number in range(6):
        found.observe(Evaluated(number, number, 0.5, 0.4, 1, {"a": (0, 0.5, 0.0), "b": (0, 1, 0)}))
    told = [text is not None for text in found.take()["evaluations"]["scores"]]
    # Two scores each: from four scores on every second evaluation is kept, from eight every third.
    assert told == [True, True, True, False, True, False]


def test_the_worst_tenth_of_twenty_are_two_and_of_errors_the_largest() -> None:
    accuracies = [value / 20 for value in range(20)]
    assert ACCURACY.worst_tenth(accuracies) == pytest.approx((0.0 + 0.05) / 2)
    assert Measure("kWh").worst_tenth(accuracies) == pytest.approx((0.95 + 0.90) / 2)
    assert math.isnan(ACCURACY.worst_tenth([math.nan]))


def test_changes_tell_who_is_where_and_the_purity() -> None:
    found = columns()
    for client, group in (("a", 0), ("b", 1)):
        found.observe(joined(client, group=group))
    found.observe(ClustersChanged(0.0, 0, ClusterChange.ASSIGN, {"a": {0: 1.0}, "b": {0: 1.0}}))
    split = {"a": {1: 1.0}, "b": {2: 0.75, 1: 0.25}}
    found.observe(ClustersChanged(5.0, 9, ClusterChange.SPLIT, split, (0,), (1, 2), 0.5, 0.4))
    told = found.take()
    assert told["placements"]["client"] == [0, 1, 0, 1]
    assert told["placements"]["cluster"] == [0, 0, 1, 2]
    assert told["placements"]["weights"][-1] == {"2": 0.75, "1": 0.25}
    assert told["changes"]["gone"] == [[], [0]]
    assert told["changes"]["made"] == [[], [1, 2]]
    assert (told["numbers"]["clusters"][-1], told["numbers"]["purity"][-1]) == (2, 1.0)


def test_labels_are_told_of_those_that_have_any() -> None:
    found = columns()
    found.observe(joined("a"))
    found.observe(ClientJoined(0.0, "b", 0, 12, None, labels="room=kitchen"))
    assert found.take()["labels"] == {"time": [0.0], "client": [1], "text": ["room=kitchen"]}


def test_drifts_rejections_verdicts_and_the_end_are_told() -> None:
    found = columns()
    found.observe(DataChanged(1.0, 0, None, 2))
    found.observe(UpdateRejected(2.0, "a", "too late", 1.5))
    found.observe(UpdateRejected(3.0, "b", "too late", 1.5))
    found.observe(UpdateJudged(3.0, "b", Verdict.REFUSED, 9.0, 4.0, "too long", 1))
    found.observe(ClientLeft(4.0, "a"))
    found.observe(RunEnded(5.0, 0, "all clients are gone"))
    told = found.take()
    assert told["drifts"]["client"] == [-1]
    assert told["reasons"] == {"text": ["too late", "too long"]}
    assert told["rejections"]["reason"] == [0, 0]
    assert told["verdicts"]["verdict"] == ["refused"]
    assert told["presence"] == {"time": [4.0], "client": [0], "online": [0]}
    assert told["ended"]["reason"] == "all clients are gone"


def test_any_name_is_json_on_one_line() -> None:
    found = columns()
    found.observe(joined(HOSTILE + "\n"))
    text = as_json(found.take())
    assert "\n" not in text
    assert text.isascii()
    assert json.loads(text)["clients"]["name"] == [HOSTILE + "\n"]
