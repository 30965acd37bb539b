"""Models beyond a memory budget are moved to a file, and come back bit for bit."""

import gc
import pickle
import weakref

import numpy as np
from flwr.app import ArrayRecord

from raceme.core.clusters import Model
from raceme.core.evaluation import Packer
from raceme.core.messages import ModelSpec
from raceme.core.state import from_tree, to_tree
from raceme.flower.messages import SpillFile, VectorStore, array, spill_arrays
from raceme.strategies.panicle.strategy import PanicleState

SPEC = ModelSpec(("a", "b"), ((3,), (2, 2)), ("float32", "float32"))


def vector(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=7).astype(np.float32)


def test_room_in_the_file_is_used_again() -> None:
    spill = SpillFile(budget=0)
    places = [spill.write(bytes([number]) * 10) for number in range(3)]
    assert [place.read()[0] for place in places] == [0, 1, 2]
    del places[1]
    assert spill.in_file == 20
    again = spill.write(b"x" * 10)
    assert again.read() == b"x" * 10
    assert [places[0].read()[0], places[1].read()[0]] == [0, 2]
    assert spill._end == 30


def test_arrays_that_are_gone_leave_room_for_others() -> None:
    spill = SpillFile(budget=10)
    arrays = [array("uint8", (size,), "numpy.ndarray", bytes(size)) for size in (4, 6, 3)]
    spill_arrays(map(weakref.ref, arrays[:2]), spill)
    assert (spill.in_memory, spill.in_file) == (10, 0)
    del arrays[0]
    assert spill.in_memory == 6
    spill_arrays([weakref.ref(arrays[-1])], spill)
    assert (spill.in_memory, spill.in_file) == (9, 0)


def test_a_vector_store_returns_its_vectors_from_memory_and_from_the_file() -> None:
    store = VectorStore(budget=2 * 28)
    for number in range(5):
        store[str(number)] = vector(number)
    assert store._spill.in_memory == 56
    assert store._spill.in_file == 84
    assert all(np.array_equal(store[str(number)], vector(number)) for number in range(5))
    store["0"] = vector(9)
    del store["4"]
    assert np.array_equal(store.pop("0"), vector(9))
    assert store.pop("0", None) is None
    assert (store._spill.in_memory, store._spill.in_file) == (28, 56)


def test_latest_models_in_a_file_can_be_saved() -> None:
    for budget in (0, 10**6):
        state = PanicleState(vector(9))
        state.latest = VectorStore(budget=budget)
        for number in range(6):
            state.latest[str(number % 4)] = vector(number)
        restored = from_tree(PanicleState, to_tree(state))
        assert {c: v.tobytes() for c, v in restored.latest.items()} == {
            c: vector(number).tobytes() for c, number in zip("0123", (4, 5, 2, 3), strict=True)
        }


def test_former_versions_that_clients_have_leave_the_memory_and_stay_what_they_are() -> None:
    packer, model = Packer(SPEC, budget=0), Model(vector(0))
    held: list[ArrayRecord] = []
    for number in range(1, 4):
        # Messages have their own records, but share arrays.
        held.append(packer.pack(0, model)[0].copy())
        model.replace(vector(number))
    packer.pack(0, model)
    assert [SPEC.unpack(record).tobytes() for record in held] == [
        vector(number).tobytes() for number in range(3)
    ]
    assert "data" not in held[0]["a"].__dict__, "its bytes are in the file"
    assert pickle.loads(pickle.dumps(held[0]["a"])).data == held[0]["a"].data
    assert packer._spill.in_file == sum(len(a.data) for r in held for a in r.values())
    held.clear()
    gc.collect()
    assert packer._spill.in_file == 0


def test_versions_that_nobody_has_are_not_written() -> None:
    packer, model = Packer(SPEC, budget=0), Model(vector(0))
    for number in range(3):
        packer.pack(0, model)
        model.replace(vector(number))
    assert packer._spill._end == 0
