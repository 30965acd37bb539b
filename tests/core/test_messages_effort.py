"""A simulated task takes the time of the client's work."""

import pytest

from raceme.core.messages import (
    BATCH_SIZE,
    LOCAL_EPOCHS,
    LOCAL_STEPS,
    TASK_SHARE,
    mini_batches,
    passes,
    short_task,
)
from raceme.core.training_settings import TrainingSettings
from raceme.training.local import epoch_sizes


@pytest.mark.parametrize(
    ("samples", "batch", "steps"), [(20, 10, 3), (7, 7, 3), (7, 50, 3), (1, 10, 100)]
)
def test_steps_are_as_many_passes_as_a_client_makes(samples: int, batch: int, steps: int) -> None:
    settings = TrainingSettings(lr=0.1, batch_size=batch, local_steps=steps)
    made = sum(epoch_sizes(samples, settings, needs_pairs=False)) / samples
    charged = {BATCH_SIZE: batch, LOCAL_STEPS: steps}
    assert passes(charged, samples) == pytest.approx(made)
    assert mini_batches(charged, samples) == pytest.approx(steps)


def test_a_step_on_fewer_samples_than_a_mini_batch_is_a_pass() -> None:
    settings = {BATCH_SIZE: 500, LOCAL_EPOCHS: 2}
    assert mini_batches(settings, 50) == 2
    assert short_task(settings, 50, 4)[TASK_SHARE] == 2.0
