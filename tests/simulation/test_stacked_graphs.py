"""Steps that are recorded once and replayed: the same results, and no repeated recording."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raceme.core.training_settings import TrainingSettings
from raceme.simulation.stacked.graphs import CudaGraphs, Eager, Recorder, Step, rounded_up
from raceme.simulation.stacked.training import Stack, StackedResult, Training
from raceme.training.local import Frozen, Pull
from raceme.training.models import Network, Samples


class Recording:
    """Replays like a CUDA graph: warm-up has no effects, and shapes are rounded up."""

    def __init__(self) -> None:
        self.recorded, self.replayed = list[int](), list[int]()

    def rows(self, count: int) -> int:
        return rounded_up(count)

    def record(self, step: Step, changed: Sequence[Tensor]) -> Step:
        number = len(self.recorded)
        self.recorded.append(number)
        kept = [values.clone() for values in changed]
        step()
        for values, former in zip(changed, kept, strict=True):
            values.copy_(former)

        def replay() -> None:
            self.replayed.append(number)
            step()

        return replay


SIZES = (3, 41, 20, 8, 33, 41, 12, 7, 41)


def network() -> Network:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)
    return Network(nn.Sequential(*layers))


def samples() -> list[Samples]:
    rng = np.random.default_rng(1)
    return [
        Samples(rng.normal(size=(size, 6)).astype(np.float32), rng.integers(0, 3, size))
        for size in SIZES
    ]


def trained(
    recorder: Recorder,
    own: Network,
    data: Sequence[Samples],
    stack: Stack | None = None,
    **more: object,
) -> list[StackedResult]:
    settings = TrainingSettings(lr=0.1, batch_size=4, local_epochs=2, **more)  # type: ignore[arg-type]
    stack = stack or Stack(torch.device("cpu"), recorder=lambda: recorder)
    assert stack.network(own, torch.zeros(1, 6)) is not None
    calls = []
    for client, held in enumerate(data):
        anchor = torch.full_like(own.weights, 0.1 * client)
        frozen = torch.arange(len(anchor)) % 5 == client % 5
        terms = [Pull(0.1 * client, anchor), Frozen(frozen)] if more else []
        rng = np.random.default_rng(client)
        call = Training.of(own, held, settings, rng, terms, None)
        assert call is not None
        calls.append(call)
    return [one for one in stack.compute(calls) if isinstance(one, StackedResult)]


@pytest.mark.parametrize(
    "more", [{}, {"optimizer": "momentum"}, {"optimizer": "adam", "weight_decay": 0.1}], ids=str
)
def test_recorded_steps_give_the_same(more: dict[str, object]) -> None:
    own, data, recording = network(), samples(), Recording()
    found = [trained(recorder, own, data, **more) for recorder in (Eager(), recording)]
    for one, other in zip(*found, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        torch.testing.assert_close(one.model.weights, other.model.weights, rtol=1e-4, atol=1e-6)
        for name, values in one.model.buffers.items():
            torch.testing.assert_close(values, other.model.buffers[name])
    # A client whose last mini-batch would be a single sample leaves it out.
    steps = [2 * -(-(size - (size % 4 == 1)) // 4) for size in SIZES]
    rows = [rounded_up(sum(count > step for count in steps)) for step in range(max(steps))]
    assert len(recording.recorded) == len(set(rows))
    assert len(recording.replayed) == max(steps)
    firsts = [recording.replayed.index(number) for number in recording.recorded]
    assert firsts == sorted(firsts)


def test_a_step_is_recorded_once() -> None:
    own, data, recording = network(), samples(), Recording()
    stack = Stack(torch.device("cpu"), recorder=lambda: recording)
    first = trained(recording, own, data, stack)
    once = len(recording.recorded)
    again = trained(recording, own, data, stack)
    assert len(recording.recorded) == once
    # Results of earlier batches are not overwritten.
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.model.weights, other.model.weights)
    fewer = trained(recording, own, data[:3], stack)
    assert torch.allclose(fewer[1].model.weights, first[1].model.weights, atol=1e-6)
    # Without room the store moves with all samples, and steps are recorded anew.
    (store,) = stack._stores.values()
    moves, once = store.moves, len(recording.recorded)
    others = Samples(np.zeros((len(store) + 1, 6), np.float32), np.zeros(len(store) + 1, np.int64))
    store.hold([others])
    assert store.moves == moves + 1
    later = trained(recording, own, data, stack)
    assert len(recording.recorded) > once
    assert torch.equal(later[0].model.weights, first[0].model.weights)


@pytest.mark.parametrize(("missing", "computations"), [(0, 2), (1, 3)])
def test_a_computation_takes_no_more_memory_than_it_may(missing: int, computations: int) -> None:
    own = Network(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)))
    # Six copies of 43 weights. Each of the four samples of a mini-batch: 6 inputs, which are the
    # largest part and count three times, 4 inputs of the second layer, and 3 outputs.
    each = 4 * (6 * 43 + 4 * (3 * 6 + 4 + 3))
    stack = Stack(torch.device("cpu"), memory=3 * each - missing)
    data = [Samples(np.ones((8, 6), np.float32), np.zeros(8, np.int64)) for _ in range(6)]
    trained(Eager(), own, data, stack)
    assert stack.batches.count == computations


def test_where_steps_cannot_be_recorded_they_are_taken_as_they_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    if torch.cuda.is_available():
        pytest.skip("CUDA records steps: this is about processors that cannot")
    own, data, graphs = network(), samples(), CudaGraphs()
    with caplog.at_level("WARNING", logger="raceme"):
        found = trained(graphs, own, data)
    assert [r.message for r in caplog.records if "CUDA graphs" in r.message] != []
    assert len(caplog.records) == 1
    for one, other in zip(found, trained(Eager(), own, data), strict=True):
        torch.testing.assert_close(one.model.weights, other.model.weights, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpus_graphs_give_the_same() -> None:
    own, data = network(), samples()
    cuda = Stack(torch.device("cuda"))
    for one, other in zip(
        trained(CudaGraphs(), own, data, cuda), trained(Eager(), own, data), strict=True
    ):
        torch.testing.assert_close(one.model.weights, other.model.weights, rtol=1e-4, atol=1e-5)


def test_numbers_are_rounded_up_to_a_few() -> None:
    wanted = {1: 1, 2: 2, 3: 4, 8: 8, 9: 10, 13: 14, 17: 20, 33: 40, 100: 112, 1000: 1024}
    assert {count: rounded_up(count) for count in wanted} == wanted
    assert all(count <= rounded_up(count) <= 1.25 * count for count in range(9, 3000))
