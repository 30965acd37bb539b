"""Messages as one byte string, in which each model is one array."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from raceme.flower.messages import (
    JOINED,
    SERVER_NODE_ID,
    copied,
    decode,
    encode,
    identify_process,
    joined,
    parted,
    set_message_id,
    size_of,
)


def message_of(content: RecordDict) -> Message:
    identify_process(1, SERVER_NODE_ID)
    message = Message(content, 7, "train", ttl=60.0)
    set_message_id(message, "ab" * 32)
    return message


def several() -> RecordDict:
    arrays = [np.arange(6, dtype=np.float32).reshape(2, 3), np.array(-0.0), np.zeros((0, 4), "<i8")]
    # A signalling NaN, whose bits a conversion would change.
    arrays.append(np.frombuffer(b"\x01\x00\xa0\x7f", dtype=np.float32))
    return RecordDict(
        {
            "arrays": ArrayRecord({f"layer.{i}": Array(a) for i, a in enumerate(arrays)}),
            "numbers": ArrayRecord([np.ones(2)]),
            "config": ConfigRecord({"kind": "train", "steps": [1, 2], "raw": b"\0", "on": True}),
            "metrics": MetricRecord({"loss": 0.5, "few": [1, 2]}),
        }
    )


def test_a_message_comes_back_bit_for_bit_and_its_model_travels_as_one_array() -> None:
    message = message_of(several())
    (one,) = joined(message).content["arrays"].values()
    assert one.stype == JOINED
    assert len(one.data) == sum(len(a.data) for a in message.content["arrays"].values())
    back = decode(encode(message))
    # This id is a hash of all names, shapes and bytes.
    assert back.content.object_id == message.content.object_id
    assert list(back.content["arrays"]) == ["layer.0", "layer.1", "layer.2", "layer.3"]
    for field in ("message_id", "run_id", "dst_node_id", "src_node_id", "created_at", "ttl"):
        assert getattr(back.metadata, field) == getattr(message.metadata, field)
    # Encoding does not change the message.
    assert len(message.content["arrays"]) == 4


def test_an_error_comes_back() -> None:
    asked = message_of(RecordDict())
    back = decode(encode(Message(Error(3, "no data"), reply_to=asked)))
    assert (back.error.code, back.error.reason) == (3, "no data")
    assert back.metadata.reply_to_message_id == asked.metadata.message_id


names = st.text(max_size=5)
arrays = st.builds(
    Array,
    dtype=st.sampled_from(["float32", "int8"]),
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    stype=st.sampled_from(["numpy.ndarray", "other"]),
    data=st.binary(max_size=20),
)


@settings(max_examples=50)
@given(st.dictionaries(names, st.dictionaries(names, arrays, max_size=4), max_size=3))
def test_whatever_the_arrays_are_they_come_back(records: dict[str, dict[str, Array]]) -> None:
    content = RecordDict({name: ArrayRecord(record) for name, record in records.items()})
    back = parted(joined(message_of(content)))
    assert back.content.object_id == content.object_id


@pytest.mark.parametrize(
    "places",
    [
        [["a", "float32", [1], "numpy.ndarray", 9]],
        [["a", "float32", [1], "numpy.ndarray", -4], ["b", "float32", [1], "numpy.ndarray", 8]],
        [["a", "float32", [-1], "numpy.ndarray", 4]],
        [["a", "float32", [True], "numpy.ndarray", 4]],
        [["a", 1, [1], "numpy.ndarray", 4]],
        [["a", "float32", [1], "numpy.ndarray"]],
        {"a": 1},
        7,
    ],
)
def test_an_array_that_does_not_say_what_it_is_made_of_is_refused(places: Any) -> None:
    one = Array(json.dumps(places), (), JOINED, b"\0\0\0\0")
    with pytest.raises((ValueError, TypeError)):
        parted(message_of(RecordDict({"arrays": ArrayRecord({"": one})})))


def test_a_copy_does_not_change_with_the_first() -> None:
    message = message_of(several())
    before, copy = message.content.object_id, copied(message)
    message.content["config"]["kind"] = "evaluate"
    message.content["config"]["steps"].append(3)
    message.content["metrics"]["loss"] = 2.0
    del message.content["arrays"]["layer.0"]
    message.metadata.delivered_at = "now"
    assert copy.content.object_id == before
    assert copy.metadata.delivered_at == ""
    assert size_of(copy) == several()["arrays"].count_bytes() + several()["numbers"].count_bytes()
