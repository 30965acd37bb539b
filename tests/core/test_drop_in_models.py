"""Models of any kind, as users' ClientApps send them."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from adopted import grid_of
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from raceme.core.drop_in import DtypeAdapter
from raceme.core.errors import UserError
from raceme.core.messages import InvalidModelError
from raceme.strategies import CASA, Standalone


def bfloat16(values: np.ndarray) -> Array:
    """Return an array of a dtype that numpy's file format does not know, as Flower makes it."""
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    buffer = io.BytesIO()
    np.save(buffer, bits.view("V2"))
    return Array("bfloat16", values.shape, "numpy.ndarray", buffer.getvalue())


def of_bfloat16(array: Array) -> np.ndarray:
    bits = array.numpy().view(np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32)


def adding_app(check: list[ArrayRecord]) -> ClientApp:
    """An app whose clients add 1 to every floating-point number."""
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        received = msg.content["arrays"]
        check.append(received)
        made = {
            name: Array(np.asarray(array.numpy() + array.numpy().dtype.type(1)))
            if array.dtype.startswith("float") and np.isfinite(array.numpy()).all()
            else array
            for name, array in received.items()
        }
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": ArrayRecord(made), "metrics": metrics}), reply_to=msg)

    return app


def models() -> dict[str, ArrayRecord]:
    tied = torch.nn.Linear(3, 3)
    other = torch.nn.Linear(3, 3)
    other.weight = tied.weight
    batch_norm = torch.nn.BatchNorm1d(4)
    return {
        "float64": ArrayRecord([np.full((2, 3), 0.5), np.zeros(())]),
        "float16": ArrayRecord({"w": torch.full((2,), 0.5, dtype=torch.float16)}),
        "fortran": ArrayRecord([np.asfortranarray(np.arange(6.0).reshape(2, 3))]),
        "batch norm": ArrayRecord(batch_norm.state_dict()),
        "tied": ArrayRecord({"a": tied.weight.detach(), "b": other.weight.detach()}),
        "adapter": ArrayRecord({"base.q_proj.lora_A.default.weight": torch.zeros(2, 8)}),
        "mask": ArrayRecord(
            {
                "w": torch.zeros(3),
                "causal": torch.full((2, 2), float("-inf")),
                "kept": torch.tensor([True, False]),
                "ids": torch.tensor([2**40, 1]),
            }
        ),
        "empty array": ArrayRecord({"w": torch.ones(2), "none": torch.zeros(0)}),
    }


@pytest.mark.parametrize("kind", models())
def test_models_come_back_as_they_are(kind: str) -> None:
    initial, received = models()[kind], []
    tested: list[ArrayRecord] = []
    result = Standalone(min_available_nodes=1).start(
        grid_of(adding_app(received), nodes=1),
        initial,
        num_rounds=2,
        evaluate_fn=lambda server_round, arrays: tested.append(arrays),  # type: ignore[func-returns-value]
    )
    assert received
    for record in (*received, *tested, result.arrays, *result.clusters.values()):
        assert list(record) == list(initial)
        for name, array in record.items():
            assert (array.dtype, array.shape) == (initial[name].dtype, initial[name].shape)
    # The only client has trained it twice.
    for name, array in result.arrays.items():
        values, before = array.numpy(), initial[name].numpy()
        computed = before.dtype.kind == "f" and np.isfinite(before).all()
        np.testing.assert_allclose(values, before + 2 if computed else before, rtol=1e-6)


def test_bfloat16_is_rounded_to_the_nearest() -> None:
    wire = DtypeAdapter(ArrayRecord({"w": bfloat16(np.array([1.0, -2.5, 0.0], np.float32))}))
    assert wire.initial["w"].dtype == "float32"
    np.testing.assert_array_equal(wire.initial["w"].numpy(), [1.0, -2.5, 0.0])
    # bfloat16 has 8 bits of precision, steps of 1/128 above 1; 1 + 1/256 lies in the middle.
    model = ArrayRecord(
        {"w": Array(np.array([1 + 0.6 / 128, 1 + 1 / 256, 1 + 3 / 256], np.float32))}
    )
    sent = wire.sent(model)["w"]
    assert sent.dtype == "bfloat16"
    np.testing.assert_array_equal(of_bfloat16(sent), [1 + 1 / 128, 1.0, 1 + 2 / 128])
    back = wire.received(ArrayRecord({"w": sent}))["w"].numpy()
    np.testing.assert_array_equal(back, of_bfloat16(sent))


def test_a_model_is_translated_once_for_many_clients() -> None:
    wire = DtypeAdapter(models()["mask"])
    model = wire.initial
    assert wire.sent(model) is wire.sent(model)
    assert list(wire.sent(model)) == ["w", "causal", "kept", "ids"]
    plain = DtypeAdapter(models()["float64"])
    assert plain.sent(plain.initial) is plain.initial


def test_a_model_without_trainable_arrays_is_refused() -> None:
    for useless in (torch.tensor([True]), torch.tensor([1, 2]), torch.tensor([math.nan])):
        with pytest.raises(UserError, match="holds no finite floating-point numbers"):
            DtypeAdapter(ArrayRecord({"w": useless}))
    # The format of Flower's strategies for trees.
    with pytest.raises(UserError, match="Trees cannot be averaged"):
        CASA().start(grid_of(adding_app([])), ArrayRecord([np.frombuffer(b"{}", np.uint8)]))
    with pytest.raises(UserError, match="'w' cannot be used"):
        DtypeAdapter(ArrayRecord({"w": Array("float32", (1,), "numpy.ndarray", b"nonsense")}))


def test_long_lists_of_names_are_shortened() -> None:
    wire = DtypeAdapter(ArrayRecord({str(index): torch.ones(1) for index in range(9)}))
    with pytest.raises(InvalidModelError, match=r"without '1', '2', '3' and 5 more$"):
        wire.received(ArrayRecord({"0": torch.ones(1)}))


def test_clusters_of_models_with_masks_load_too() -> None:
    initial = models()["mask"]
    result = CASA().start(grid_of(adding_app([]), nodes=3), initial, num_rounds=1)
    assert list(result.arrays) == list(initial)
