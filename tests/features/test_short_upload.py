"""Uploads of 8 bits per weight: codes and ranges by hand, error feedback, and runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from raceme.client_app import client_app
from raceme.core.chain import Chain
from raceme.core.config import RunConfig
from raceme.core.messages import InvalidModelError, ModelSpec, from_array, to_array
from raceme.core.requests import InFlight, InvalidReplyError, read_update
from raceme.features.short_upload.codes import decoded, encoded
from raceme.features.short_upload.server import ShortUpload
from raceme.flower.messages import array_record, identify_process
from raceme.runs.experiment import simulate
from raceme.simulation.devices import training_cost
from raceme.training.models import initial_arrays


def record(**values: np.ndarray) -> ArrayRecord:
    return array_record({name: to_array(array) for name, array in values.items()})


def numbers(found: ArrayRecord) -> dict[str, np.ndarray]:
    return {name: from_array(array) for name, array in found.items()}


def test_each_row_has_256_levels_between_its_extremes() -> None:
    weights = np.array([[0.0, 1.0, 2.55], [-1.0, -1.0, -1.0]], np.float32)
    codes, scales = encoded(record(w=weights, n=np.array([7])), array_record({}))
    # Steps of 2.55 / 255 = 0.01; a row of equal numbers is encoded by its minimum.
    assert numbers(codes)["w"].tolist() == [[0, 100, 255], [0, 0, 0]]
    assert numbers(scales)["w"] == pytest.approx(np.array([[0.0, 0.01], [-1.0, 0.0]]))
    assert numbers(codes)["n"].tolist() == [7]
    assert numbers(decoded(codes, scales))["w"] == pytest.approx(weights, abs=1e-6)


def test_running_statistics_are_sent_as_they_are() -> None:
    residual = array_record({})
    var = np.array([0.001, 0.13, 5.0, 51.0], np.float32)
    for other in (0.13, 0.06):
        var[1] = other
        model = {"bn.running_var": to_array(var), "bn.weight": to_array(np.ones(4, np.float32))}
        codes, scales = encoded(array_record(model), residual)
        assert set(scales) == set(residual) == {"bn.weight"}
        # An error of half a step, 0.1, would have made a variance negative.
        assert numbers(decoded(codes, scales))["bn.running_var"].tolist() == var.tolist()


def test_what_is_left_out_is_added_to_the_next_upload() -> None:
    residual = array_record({})
    weights = np.array([0.0, 0.4, 255.0], np.float32)
    sent = []
    for _ in range(5):
        codes, scales = encoded(record(w=weights), residual)
        sent.append(numbers(decoded(codes, scales))["w"][1])
    # Steps of 1: 0.4 is 0, 0.8 is 1 (−0.2 is left), 0.2 is 0, 0.6 is 1 (−0.4 is left), 0 is 0.
    assert sent == pytest.approx([0, 1, 0, 1, 0], abs=0.01)


@given(arrays(np.float32, (3, 5), elements=st.floats(-100, 100, width=32)), st.integers(1, 4))
def test_no_more_than_half_a_step_is_ever_left_out(weights: np.ndarray, uploads: int) -> None:
    residual, total = array_record({}), np.zeros((3, 5))
    for _ in range(uploads):
        codes, scales = encoded(record(w=weights), residual)
        total += numbers(decoded(codes, scales))["w"]
    step = numbers(scales)["w"][:, 1:].astype(np.float64)
    left = uploads * weights.astype(np.float64) - total
    assert (np.abs(left) <= 0.5 * step + 1e-3).all()
    assert np.abs(left - numbers(residual)["w"]).max() < 1e-3


def test_the_server_reads_codes_as_the_model_and_counts_their_bytes() -> None:
    identify_process()
    model = record(w=np.linspace(-1, 1, 1000, dtype=np.float32).reshape(10, 100))
    spec, task = ModelSpec.of(model), InFlight(1, "a", 0, 0, 0, 0.0, 0, kind="train")

    def reply(**records: ArrayRecord) -> Message:
        content = RecordDict({**records, "metrics": MetricRecord({"num-examples": 5})})
        content["config"] = ConfigRecord({"task": 1, "version": 0})
        return Message(content, reply_to=Message(RecordDict(), 7, "train"))

    codes, scales = encoded(model, array_record({}))

    def reading(content: RecordDict) -> RecordDict:
        return ShortUpload().on_reply(content, None)

    update = read_update(reply(arrays=codes, scales=scales), task, spec, reading=reading)
    plain = read_update(reply(arrays=model), task, spec)
    assert update.vector == pytest.approx(plain.vector, abs=0.005)
    # 1,000 codes and ten pairs of float32, with headers, beside 4,000 bytes.
    assert 1080 <= update.bytes_up <= 1500 < 4000 <= plain.bytes_up
    wrong = {
        "too few rows": record(w=numbers(scales)["w"][:9]),
        "other numbers": record(w=numbers(scales)["w"].astype(np.float64)),
        "not finite": record(w=numbers(scales)["w"] * np.float32(np.nan)),
        "another array": record(v=numbers(scales)["w"]),
    }
    for ranges in wrong.values():
        with pytest.raises((InvalidReplyError, InvalidModelError)):
            read_update(reply(arrays=codes, scales=ranges), task, spec, reading=reading)
    with pytest.raises(InvalidModelError, match="do not fit together"):
        read_update(reply(arrays=model, scales=scales), task, spec, reading=reading)
    with pytest.raises(InvalidReplyError, match="scales without codes"):
        read_update(reply(scales=scales), task, spec, reading=reading)
    with pytest.raises(InvalidReplyError, match="2 ArrayRecords, not 1"):
        read_update(reply(arrays=codes, scales=scales), task, spec)


def node(config: RunConfig, **own: float) -> Context:
    identify_process()
    return Context(
        1, 7, {"partition-id": 1, "num-partitions": 4, **own}, RecordDict(), config.to_mapping()
    )


def trained(config: RunConfig, context: Context, **settings: float) -> RecordDict:
    said = ConfigRecord({"task": 1, "kind": "train", **settings})
    content = RecordDict({"arrays": initial_arrays(config), "config": said})
    return client_app()(Message(content, 7, "train"), context).content


def test_a_model_that_is_not_finite_is_sent_as_it_is() -> None:
    config = RunConfig(clients=4, model="mclr").with_values(upload="int8")
    context = node(config)
    content = trained(config, context, lr=1e38)
    assert "scales" not in content
    assert "upload-residual" not in context.state


def test_codes_are_made_of_what_privacy_lets_out() -> None:
    config = RunConfig(clients=4, model="mclr").with_values(upload="int8")
    own = {"local-dp-epsilon": 5.0, "local-dp-clip": 0.5, "local-dp-seed": 3}
    content = trained(config, node(config, **own))
    whole = config.with_values(upload="float32")
    plain = trained(whole, node(whole, **own))
    found = decoded(content.array_records["arrays"], content.array_records["scales"])
    for name, values in numbers(plain.array_records["arrays"]).items():
        spread = float(np.ptp(values))
        assert numbers(found)[name] == pytest.approx(values, abs=0.003 * spread)


@pytest.mark.slow
def test_a_run_takes_a_third_of_the_bytes_wherever_clients_work(tmp_path: Path) -> None:
    common = RunConfig(strategy="casa", clients=8, max_updates=32, eval_every=32)
    found = {}
    for name, changes in {
        "float32": {"upload": "float32", "workers": "0"},
        "int8": {"upload": "int8", "workers": "0"},
        "processes": {"upload": "int8", "workers": "1"},
        "vectorised": {"upload": "int8", "vectorised": True},
    }.items():
        config = common.with_values(out=str(tmp_path / name), **changes)
        found[name] = simulate(config).summary
    assert found["int8"]["bytes_up"] < 0.35 * found["float32"]["bytes_up"]
    assert found["int8"]["bytes_down"] == found["float32"]["bytes_down"]
    assert found["int8"]["accuracy"] == pytest.approx(found["float32"]["accuracy"], abs=0.05)
    for name in ("processes", "vectorised"):
        assert found[name]["accuracy"] == found["int8"]["accuracy"]
        assert found[name]["bytes_up"] == found["int8"]["bytes_up"]


def test_a_short_upload_takes_a_quarter_of_the_time_of_the_network() -> None:
    config = RunConfig(clients=4, model="mclr").with_values(upload="int8")
    said = ConfigRecord({"task": 1, "kind": "train"})
    asked = Message(RecordDict({"arrays": initial_arrays(config), "config": said}), 7, "train")
    short = training_cost(asked, node(config), 20, features=Chain.of(config))
    whole = training_cost(asked, node(config), 20)
    assert short is not None
    assert whole is not None
    assert (short.bytes_up, short.bytes_down) == (whole.bytes_up // 4, whole.bytes_down)
