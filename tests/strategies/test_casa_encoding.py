"""Whole models and sketches: exact terms, and the error of the estimated one."""

import numpy as np
import pytest
from numpy.typing import NDArray

from raceme.core.clients import Client
from raceme.core.errors import UserError
from raceme.core.requests import InFlight, Update
from raceme.strategies import CASA, CASAParameters
from raceme.strategies.casa.buffers import Sketches, WholeModels, shortener


def exact_error(similarity: NDArray[np.floating], models: NDArray[np.float32]) -> float:
    """Return the largest error of a matrix of cosines against the models' exact ones.

    Parameters
    ----------
    similarity : ndarray
        Cosines to be checked; NaN where unknown. Shape (n, n).
    models : ndarray
        The models. Shape (n, d).
    """
    unit = models / np.linalg.norm(models, axis=1, keepdims=True)
    return float(np.nanmax(np.abs(similarity - unit @ unit.T)))


def models(clients: int, size: int, spread: float) -> np.ndarray:
    rng = np.random.default_rng(1)
    return (rng.normal(size=size) + spread * rng.normal(size=(clients, size))).astype(np.float32)


def matrix_of(encoder: WholeModels | Sketches, vectors: np.ndarray) -> np.ndarray:
    codes = [encoder.encode(vector) for vector in vectors]
    return np.array([[a.stored @ b.query for a in codes] for b in codes])


def test_whole_models_are_exact() -> None:
    vectors = models(6, 500, 0.5)
    assert exact_error(matrix_of(WholeModels(), vectors), vectors) < 1e-6


def test_sketches_are_symmetric_and_exact_where_only_the_reference_counts() -> None:
    vectors = models(5, 2000, 0.1)
    encoder = Sketches(np.zeros(2000, np.float32) + 1.0, size=64, seed=0)
    matrix = matrix_of(encoder, vectors)
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-6)
    reference = encoder.encode(np.ones(2000, np.float32))
    # The reference itself has δ = 0, so that nothing is estimated.
    assert reference.stored @ reference.query == pytest.approx(1.0, abs=1e-6)
    other = encoder.encode(vectors[0])
    exact = vectors[0].sum() / (np.linalg.norm(vectors[0]) * np.sqrt(2000))
    assert reference.stored @ other.query == pytest.approx(float(exact), abs=1e-5)


def test_the_error_falls_with_the_size_of_the_sketch() -> None:
    reference = models(1, 5000, 0.0)[0]
    vectors = models(20, 5000, 0.1)
    errors = [
        exact_error(matrix_of(Sketches(reference, size, seed=0), vectors), vectors)
        for size in (16, 256, 4096)
    ]
    # |δ|² / |w|² is 0.01, so that the errors are about 0.01 / √16, 0.01 / √256 and 0.01 / √4096.
    assert errors[0] > errors[1] > errors[2]
    assert errors[1] < 0.01 * 4 / 16


def test_a_sketch_is_a_linear_projection_of_the_difference() -> None:
    reference = np.ones(4000, np.float32)
    delta = models(1, 4000, 0.0)[0]
    encoder = Sketches(reference, size=1024, seed=0)
    once, thrice = (
        encoder.sketch_of(encoder.encode(reference + factor * delta)) for factor in (1, 3)
    )
    assert once.shape == (1024,)
    np.testing.assert_allclose(thrice, 3 * once, atol=1e-3)
    # Lengths are kept up to 1/√1024, three standard deviations here.
    assert np.linalg.norm(once) == pytest.approx(np.linalg.norm(delta), rel=3 / 32)


@pytest.mark.parametrize("encoder", [WholeModels(), Sketches(np.ones(9, np.float32), 4, seed=0)])
def test_nothing_is_similar_to_a_mean_of_zero(encoder: WholeModels | Sketches) -> None:
    code = encoder.encode(np.arange(9, dtype=np.float32))
    assert encoder.cosine(code, np.zeros_like(code.stored)) == 0.0


def test_a_projection_too_large_for_the_memory_is_refused() -> None:
    # 32 · 10⁷ · √10⁷ bytes are 942 GiB.
    with pytest.raises(UserError, match="to 9,999,999 numbers would take 942 GiB of memory"):
        Sketches(np.zeros(10_000_000, np.float32), 9_999_999, seed=0)


def test_models_of_up_to_512_weights_are_placed_whole() -> None:
    assert isinstance(shortener(np.ones(512, np.float32)), WholeModels)
    # A sketch of 256 numbers and three exact terms.
    assert len(shortener(np.ones(513, np.float32)).encode(np.zeros(513, np.float32)).stored) == 259


def test_casa_with_sketches_finds_the_groups_with_less_memory() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=4000).astype(np.float32)
    centres = base + 0.8 * rng.normal(size=(2, 4000)).astype(np.float32)
    found = {}
    for sketch in (0, 256):
        strategy = CASA(CASAParameters(sketch=sketch))
        strategy.initialize(base.copy())
        for client in range(10):
            strategy.on_join(Client(f"c{client}", 10))
        for step in range(40):
            client = step % 10
            cluster = strategy.clusters.main(f"c{client}")
            version = strategy.models[cluster].version
            task = InFlight(step, f"c{client}", cluster, version, step, 0.0, 0)
            strategy.on_sent(task)
            vector = centres[client % 2] + 0.05 * rng.normal(size=4000)
            strategy.applied([Update(task, vector.astype(np.float32), 10, 0.0)])
        found[sketch] = [strategy.clusters.main(f"c{client}") for client in range(10)]
        assert len(set(found[sketch])) == 2
        assert len({(client % 2, found[sketch][client]) for client in range(10)}) == 2
        assert strategy.state.buffers.codes.shape[1] == (sketch + 3 if sketch else 4000)
