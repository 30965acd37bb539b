"""Models as flat vectors and in messages, and invalid models."""

import io
import pickle

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from raceme.core.config import RunConfig
from raceme.core.messages import InvalidModelError, ModelSpec, Role, from_array, passes, to_array
from raceme.datasets.source import DataShape
from raceme.training import models


def record_of(**arrays: np.ndarray) -> ArrayRecord:
    """Flower's own serialisation."""
    return ArrayRecord({name: Array(values) for name, values in arrays.items()})


def npy(values: np.ndarray, **options: bool) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values, **options)
    return buffer.getvalue()


def array_of(data: bytes) -> Array:
    return Array(dtype="float32", shape=(2,), stype="numpy.ndarray", data=data)


PAIR = ModelSpec(("w",), ((2,),), ("float32",))


def test_a_spec_lists_names_shapes_and_types() -> None:
    spec = ModelSpec.of(record_of(w=np.ones((2, 3), np.float32), steps=np.array(7)))
    assert spec == ModelSpec(("w", "steps"), ((2, 3), ()), ("float32", "int64"))
    assert spec.sizes == (6, 1)
    assert spec.size == 7
    assert spec.num_bytes == 6 * 4 + 8


@pytest.mark.parametrize(("shape", "outputs"), [((10, 32), 10), ((10,), 10), ((1, 5), 1), ((), 1)])
def test_outputs_are_those_of_the_last_weights(shape: tuple[int, ...], outputs: int) -> None:
    names, shapes = ("hidden", "last", "steps"), ((32, 5), shape, (3,))
    assert ModelSpec(names, shapes, ("float32", "float32", "int64")).outputs == outputs


def test_arrays_follow_each_other_in_the_vector() -> None:
    record = record_of(w=np.array([[1, 2], [3, 4]], np.float32), b=np.float32([5]))
    spec = ModelSpec.of(record)
    vector = spec.unpack(record)
    assert vector.dtype == np.float32
    assert vector.tolist() == [1, 2, 3, 4, 5]
    views = spec.views(vector)
    views["w"][1, 0] = 30
    assert vector.tolist() == [1, 2, 30, 4, 5]


@pytest.mark.parametrize(
    "values",
    [
        np.array(2.5, np.float32),
        np.array(17, np.int64),
        np.array([3, 0, -2], np.int32),
        np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1),
        np.arange(6, dtype=np.float64).reshape(3, 2) / 4,
        np.arange(4, dtype=np.float16),
        np.arange(4, dtype=">f4"),
        np.empty((0, 3), np.float32),
    ],
    ids=lambda values: f"{values.dtype}{values.shape}",
)
def test_pack_and_unpack_are_each_others_inverse(values: np.ndarray) -> None:
    record = record_of(first=values, last=np.float32([1, 2]))
    spec = ModelSpec.of(record)
    vector = spec.unpack(record)
    assert vector.tolist() == [*values.ravel().tolist(), 1, 2]
    back = spec.pack(vector)
    assert list(back) == ["first", "last"]
    # Flower reads messages that Raceme writes.
    restored = back["first"].numpy()
    assert restored.shape == values.shape
    assert restored.dtype == values.dtype
    np.testing.assert_array_equal(restored, values)
    assert spec.unpack(back).tolist() == vector.tolist()


@settings(max_examples=50)
@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.int64, np.uint8]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        elements=st.integers(0, 100),
    )
)
def test_our_arrays_and_flowers_are_the_same_bytes_to_numpy(values: np.ndarray) -> None:
    np.testing.assert_array_equal(from_array(Array(values)), values)
    ours = ArrayRecord({"x": to_array(values)})
    (theirs,) = ours.to_numpy_ndarrays()
    assert theirs.dtype == values.dtype
    np.testing.assert_array_equal(theirs, values)
    assert ours["x"].shape == values.shape


def test_reading_copies_nothing_and_cannot_change_the_message() -> None:
    values = from_array(Array(np.ones(3, np.float32)))
    assert not values.flags.writeable
    assert not values.flags.owndata


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (record_of(), "wrong arrays"),
        (record_of(v=np.zeros(2, np.float32)), "wrong arrays"),
        (record_of(w=np.zeros(2, np.float32), v=np.zeros(1)), "wrong arrays"),
        (record_of(w=np.zeros(3, np.float32)), r"wrong shape of 'w': \(3,\), not \(2,\)"),
        (record_of(w=np.zeros((2, 1), np.float32)), "wrong shape"),
        (record_of(w=np.zeros(2, np.complex64)), "wrong type"),
        (record_of(w=np.array(["a", "b"])), "wrong type"),
        (record_of(w=np.array([True, False])), "wrong type"),
        (record_of(w=np.float32([0, np.nan])), "not finite"),
        (record_of(w=np.float32([0, -np.inf])), "not finite"),
        (record_of(w=np.array([0, 1e300])), "not finite"),
    ],
)
def test_a_model_of_another_form_is_refused(record: ArrayRecord, message: str) -> None:
    with pytest.raises(InvalidModelError, match=message):
        PAIR.unpack(record)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [3.4e38, -3.4e38, 8e14])
def test_numbers_that_would_overflow_on_the_server_are_refused(value: float) -> None:
    with pytest.raises(InvalidModelError, match="too large: the model's length is"):
        PAIR.unpack(record_of(w=np.float32([value, value])))


@pytest.mark.filterwarnings("error")
def test_large_finite_numbers_are_accepted() -> None:
    assert PAIR.unpack(record_of(w=np.float32([7e14, -7e14]))).tolist() == [
        np.float32(7e14),
        -np.float32(7e14),
    ]
    with pytest.raises(InvalidModelError, match="not finite"):
        PAIR.unpack(record_of(w=np.array([1e39, 0.0])))


class Bomb:
    """Fails the test when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("something was unpickled",))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not an array",
        b"\x93NUMPY",
        npy(np.zeros(2, np.float32))[:-1],
        npy(np.zeros(2, np.float32))[:40],
        npy(np.zeros(2, np.float32)).replace(b"(2,)", b"(-2,)"),
        npy(np.zeros(2, np.float32)).replace(b"(2,)", b"((((("),
        npy(np.zeros(2, np.float32)).replace(b"'<f4'", b"'xyz'"),
        npy(np.array([Bomb(), Bomb()], object), allow_pickle=True),
        pickle.dumps(Bomb()),
    ],
    ids=lambda data: repr(data[:12]),
)
def test_bytes_that_are_no_plain_array_are_refused_and_never_unpickled(data: bytes) -> None:
    with pytest.raises(InvalidModelError):
        PAIR.unpack(ArrayRecord({"w": array_of(data)}))


@settings(max_examples=200)
@given(st.data())
def test_damaged_bytes_raise_nothing_else(data: st.DataObject) -> None:
    damaged = bytearray(npy(np.float32([1, 2])))
    places = data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=8))
    for place in places:
        damaged[place] = data.draw(st.integers(0, 255))
    try:
        vector = PAIR.unpack(ArrayRecord({"w": array_of(bytes(damaged))}))
    except InvalidModelError:
        return
    assert vector.shape == (2,)
    assert np.isfinite(vector).all()


# Parts of a model: compared weights, averaged weights, and counters.


def normalised() -> ModelSpec:
    """Two weights, a layer of batch normalisation over two features, one bias."""
    return ModelSpec.of(
        record_of(
            **{
                "0.weight": np.ones(2, np.float32),
                "1.weight": np.ones(2, np.float32),
                "1.running_mean": np.zeros(2, np.float32),
                "1.running_var": np.ones(2, np.float32),
                "1.num_batches_tracked": np.array(7),
                "2.bias": np.ones(1, np.float32),
            }
        )
    )


def test_arrays_have_roles_by_name_and_type() -> None:
    trainable, statistics, counter = Role.TRAINABLE, Role.STATISTICS, Role.COUNTER
    roles = (trainable, trainable, statistics, statistics, counter, trainable)
    assert normalised().roles == roles
    assert Role.of("running_mean", "float16") is statistics
    assert Role.of("running_means.weight", "float32") is trainable
    assert Role.of("num_batches_tracked", "float32") is counter
    assert Role.of("0.steps", "int64") is Role.of("0.seen", "uint8") is counter


def test_only_weights_are_compared() -> None:
    spec = normalised()
    vector = np.arange(10, dtype=np.float32)
    assert spec.compared(vector).tolist() == [0, 1, 2, 3, 9]
    assert spec.compared(np.stack([vector, -vector]))[1].tolist() == [0, -1, -2, -3, -9]


def test_a_model_without_buffers_is_compared_as_it_is_without_a_copy() -> None:
    spec = ModelSpec.of(record_of(w=np.ones((2, 3), np.float32)))
    vector = np.arange(6, dtype=np.float32)
    assert spec.trainable is None
    assert spec.counters is None
    assert spec.compared(vector) is vector


def test_counters_are_copied_and_nothing_else_is() -> None:
    spec = normalised()
    mixed, update = np.full(10, 0.5, np.float32), np.arange(10, dtype=np.float32)
    spec.copy_counters(update, mixed)
    assert mixed.tolist() == [0.5] * 8 + [8.0] + [0.5]
    plain = ModelSpec.of(record_of(w=np.ones(10, np.float32)))
    plain.copy_counters(update, mixed)
    assert mixed[0] == 0.5


def test_the_roles_of_a_models_arrays_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        normalised().trainable[0] = False  # type: ignore[index]


def test_a_residual_networks_weights_are_told_from_its_statistics_and_counters() -> None:
    config = RunConfig(model="networks:resnet18")
    spec = ModelSpec.of(models.initial_arrays(config, DataShape((3, 32, 32), 10)))
    # torchvision counts 11,689,512 weights for 1,000 classes, 513 per class. The 20 layers of batch
    # normalisation have 4,800 channels in total.
    weights = 11_689_512 - 990 * 513
    assert spec.size == weights + 2 * 4_800 + 20
    assert spec.compared(np.zeros(spec.size, np.float32)).shape == (weights,)
    assert spec.counters is not None
    assert spec.counters.sum() == 20


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 1.0),
        ({"local-epochs": 3, "batch-size": 10}, 3.0),
        ({"local-epochs": 3, "local-steps": 0}, 3.0),
        ({"local-epochs": 3, "local-steps": 6, "batch-size": 10}, 1.5),
    ],
)
def test_a_message_says_how_often_a_client_goes_through_its_samples(
    settings: dict[str, int], expected: float
) -> None:
    assert passes(settings, examples=40) == expected
