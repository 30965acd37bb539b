"""FlexCFL-Async: cold start, mixing and migration at every single update."""

import numpy as np
import pytest
from clustered import (
    check_it_can_be_restored,
    found,
    homes,
    last_accuracy,
    round_of,
    run_on,
    step,
    three_groups,
    update,
    with_clients,
)

from raceme.core import events
from raceme.core.clients import Client
from raceme.core.errors import UserError
from raceme.core.messages import LABEL_COUNTS
from raceme.core.requests import Answer, InFlight
from raceme.strategies import FlexCFLAsync, FlexCFLAsyncParameters


def started(**options: object) -> FlexCFLAsync:
    """Four clients in two groups at (3, 0.05) and (0.05, 2)."""
    parameters = FlexCFLAsyncParameters(groups=2, alpha=0.5, decay="constant", **options)
    strategy = with_clients(FlexCFLAsync(parameters), 4)
    strategy.progress.fleet.clients = {f"c{i}": Client(f"c{i}", 10) for i in range(5)}
    round_of(strategy, (2, 0), (0, 1), (4, 0.1), (0.1, 3))
    return strategy


def test_an_update_is_mixed_into_its_group_at_once() -> None:
    strategy = started(detect="none")
    applied = step(strategy, "c0", 5, 0.05)
    assert (applied.cluster, applied.staleness, applied.weight) == (1, 0, 0.5)
    assert strategy.models[1].vector.tolist() == pytest.approx([4.0, 0.05])
    assert strategy.models[2].vector.tolist() == pytest.approx([0.05, 2.0])


def test_a_newcomer_trains_w0_first_and_joins_the_nearest_group() -> None:
    strategy = started(detect="none")
    strategy.on_join(Client("c4", num_examples=10))
    assert strategy.request_for("c4").arrays
    assert step(strategy, "c4", 0.1, 1).weight == 0.0
    assert homes(strategy)["c4"] == 2
    assert strategy.request_for("c4").arrays == {}


def test_label_counts_are_asked_for_before_each_training() -> None:
    strategy = started()

    def say(*counts: int) -> None:
        task = InFlight(99, "c0", 1, 0, 0, 0.0, 0, kind=LABEL_COUNTS)
        strategy.on_answer(Answer(task, 10, numbers={LABEL_COUNTS: np.array(counts)}))
        strategy.close_task(task)

    assert strategy.request_for("c0").kind == LABEL_COUNTS
    say(10, 0)
    assert strategy.request_for("c0").kind == "train"
    step(strategy, "c0", 5, 0)
    assert strategy.request_for("c0").kind == LABEL_COUNTS
    say(0, 10)
    # Its data have changed: it trains w0, and then belongs to the other group.
    assert strategy.request_for("c0").arrays
    step(strategy, "c0", 0, 7)
    assert homes(strategy)["c0"] == 2
    say(0, 10)
    assert strategy.request_for("c0").arrays == {}


def test_a_client_with_labels_of_one_group_alone_moves_there_at_once() -> None:
    strategy = started()

    def say(client: str, *counts: int) -> None:
        task = InFlight(99, client, 1, 0, 0, 0.0, 0, kind=LABEL_COUNTS)
        strategy.on_answer(Answer(task, 10, numbers={LABEL_COUNTS: np.array(counts)}))
        strategy.close_task(task)

    assert homes(strategy) == {"c0": 1, "c1": 2, "c2": 1, "c3": 2}
    say("c0", 10, 0, 0)
    say("c2", 9, 1, 0)
    say("c1", 0, 5, 5)
    say("c3", 0, 6, 4)
    # It shares half of its labels with c1 and 0.6 with c3, both of group 2.
    say("c0", 0, 10, 0)
    assert homes(strategy)["c0"] == 2
    assert strategy.request_for("c0").arrays == {}
    # No client shares half of its labels: it trains w0.
    say("c1", 4, 0, 6)
    assert strategy.request_for("c1").arrays


def test_a_late_update_of_a_client_that_has_moved_changes_no_group() -> None:
    strategy = started(detect="none")
    late = update(strategy, "c0", 100, 100)
    strategy.clusters.assign("c0", 2)
    models = {k: model.vector.tolist() for k, model in strategy.models.items()}
    assert strategy.applied([late])[0].weight == 0.0
    assert {k: model.vector.tolist() for k, model in strategy.models.items()} == models


def test_an_update_that_goes_where_another_group_goes_makes_its_client_cold() -> None:
    strategy = started(detect="direction")
    step(strategy, "c0", 4, 0.1)
    step(strategy, "c2", 3, 4)
    assert strategy.state.cold == {"c2": True}


def test_the_groups_are_found_on_virtual_time() -> None:
    strategy = FlexCFLAsync(FlexCFLAsyncParameters(groups=3, pretrain=2, detect="none"))
    seen = run_on(strategy, three_groups())
    assert found(strategy) == [4, 4, 4]
    assert last_accuracy(seen) > 0.9
    # No client waits: the fast clients have sent five times as many updates as the slow ones.
    updates = [event.client for event in seen if isinstance(event, events.UpdateApplied)]
    assert updates.count("c1") > 3 * updates.count("c0")


def test_more_groups_than_clients_is_an_error_before_the_run() -> None:
    with pytest.raises(UserError, match="5 groups cannot be made of 4 clients"):
        FlexCFLAsync(FlexCFLAsyncParameters(groups=5)).check(4)


@pytest.mark.parametrize("detect", ["direction", "none"])
def test_it_can_be_restored(detect: str) -> None:
    check_it_can_be_restored(FlexCFLAsync, FlexCFLAsyncParameters(groups=3, detect=detect))
