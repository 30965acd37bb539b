"""FedCompass: the step by hand, and its messages."""

import pytest
from clustered import at_version, check_it_can_be_restored, round_of, update, with_clients

from raceme.core.clients import Client
from raceme.core.errors import UserError
from raceme.core.messages import BATCH_SIZE, LOCAL_EPOCHS, LOCAL_STEPS, TASK_SHARE
from raceme.strategies import FedCompass, FedCompassParameters


def test_the_step_of_a_group_by_hand() -> None:
    made = with_clients(FedCompass(FedCompassParameters(alpha=0.8, a=0.5)), 4)
    stale = update(made, "c1", 0, 8)
    at_version(made, 3)
    fresh = update(made, "c0", 4, 0)
    applied = made.applied([fresh, stale])
    # 0.8 / 4 of (4, 0), and half of that of (0, 8), which is three versions old.
    assert made.models[0].vector == pytest.approx([0.8, 0.8])
    assert made.models[0].version == 4
    assert [one.staleness for one in applied] == [0, 3]
    assert [one.weight for one in applied] == pytest.approx([0.2, 0.1])


def test_all_are_measured_against_the_same_model() -> None:
    made = with_clients(FedCompass(FedCompassParameters(alpha=1.0)), 2)
    round_of(made, (2, 0), (0, 2))
    assert made.models[0].vector.tolist() == [1, 1]


def test_n_is_how_many_are_online() -> None:
    made = with_clients(FedCompass(FedCompassParameters(alpha=0.5)), 4)
    made.on_leave("c3")
    made.on_leave("c2")
    made.applied([update(made, "c0", 4, 0)])
    assert made.models[0].vector.tolist() == [1, 0]


def test_the_message_states_steps_and_their_share_of_a_task() -> None:
    made = with_clients(FedCompass(), 1)
    made.train_config.update({BATCH_SIZE: 10, LOCAL_EPOCHS: 2})
    made.progress.fleet.clients["c0"] = Client("c0", num_examples=50)
    made.scheduling.state.steps["c0"] = 40
    # Ten mini-batches are the usual task.
    assert made.request_for("c0").settings == {LOCAL_STEPS: 40, TASK_SHARE: 4.0}


def test_more_steps_at_least_than_at_most_are_refused() -> None:
    with pytest.raises(UserError, match="must not be larger"):
        FedCompassParameters(min_steps=30, max_steps=20)


def test_its_state_can_be_restored() -> None:
    check_it_can_be_restored(FedCompass)
