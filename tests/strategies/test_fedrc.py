"""FedRC: responsibilities, the label table and a round by hand."""

from typing import Any

import numpy as np
import pytest
from clustered import (
    NUMBERS,
    check_it_can_be_restored,
    homes,
    run_on,
    three_groups,
    with_clients,
)
from runs import of

from raceme.core import events
from raceme.core.clients import Client
from raceme.core.requests import Answer, InFlight, InvalidReplyError, Update
from raceme.strategies import FedRC, FedRCParameters
from raceme.strategies.fedrc import LABEL_MASSES, LABEL_TABLE, MIXING, TRAIN_WEIGHTED, WEIGHTED_BY
from raceme.strategies.fedrc.client import responsibilities
from raceme.strategies.fedrc.strategy import label_table, mixing_of


def made_of(clients: int, k: int = 2) -> FedRC:
    made: FedRC = with_clients(FedRC(FedRCParameters(k=k)), clients)
    for index in range(clients):
        made.progress.fleet.clients[f"c{index}"] = Client(f"c{index}", 10)
    return made


def answer(client: str, masses: Any, examples: int = 10) -> Answer:
    task = InFlight(0, client, 0, 0, 0, sent_at=0.0, bytes_down=0, kind=LABEL_MASSES)
    return Answer(task, examples, numbers={LABEL_MASSES: np.asarray(masses, np.float64)})


def trained(client: str, model: int, examples: int, *weights: float) -> Update:
    task = InFlight(next(NUMBERS), client, model, 0, 0, 0.0, 0, kind=TRAIN_WEIGHTED)
    return Update(task, np.array(weights, np.float32), examples, 0.0)


def test_responsibilities_by_hand() -> None:
    # Two samples, each twice as likely under the first model. Its frequency of label 1 is a third
    # of the second's, so that the second sample is six times as likely to be its own.
    losses = np.log(np.array([[1.0, 1.0], [2.0, 2.0]]))
    table = np.array([[0.5, 0.1], [0.5, 0.3]])
    shares = responsibilities(losses, np.array([0, 1]), np.array([0.5, 0.5]), table)
    assert shares[:, 0] == pytest.approx([2 / 3, 1 / 3])
    assert shares[:, 1] == pytest.approx([6 / 7, 1 / 7])
    # ω weights them: 2 · 0.2 and 1 · 0.8.
    shares = responsibilities(losses, np.array([0, 1]), np.array([0.2, 0.8]), table)
    assert shares[:, 0] == pytest.approx([1 / 3, 2 / 3])


def test_a_sample_with_an_infinite_loss_belongs_to_another_model() -> None:
    losses = np.array([[np.nan, 1.0], [1.0, np.inf]])
    shares = responsibilities(losses, np.array([0, 0]), np.array([0.5, 0.5]), np.ones((2, 1)))
    assert shares.tolist() == [[0.0, 1.0], [1.0, 0.0]]
    senseless = responsibilities(
        np.full((2, 1), np.nan), np.array([0]), np.zeros(2), np.zeros((2, 1))
    )
    assert senseless[:, 0].tolist() == [0.5, 0.5]


def test_the_table_and_the_mixing_of_three_clients_by_hand() -> None:
    masses = [np.array([[3.0, 1.0], [1.0, 0.0]]), np.array([[3.0, 0.0], [0.0, 0.0]])]
    assert mixing_of(masses[0]).tolist() == [0.8, 0.2]
    # (6, 1) / 7; the second model has no samples of class 1: 1e-8 over the sum.
    table = label_table(masses)
    assert table[0].tolist() == pytest.approx([6 / 7, 1 / 7])
    assert table[1].tolist() == pytest.approx([1 / (1 + 1e-8), 1e-8 / (1 + 1e-8)])
    assert label_table([np.zeros((1, 4))]).tolist() == [[0.25] * 4]


def test_a_client_is_sent_what_belongs_to_it_and_belongs_where_most_of_it_does() -> None:
    made = made_of(3)
    first = made._assign("c0")
    assert first.models == (0, 1)
    assert not first.arrays
    made.on_answer(answer("c0", [[3, 1], [2, 4]]))
    assert homes(made)["c0"] == 1
    again, other = made._assign("c0"), made._assign("c1")
    assert again.arrays[MIXING][MIXING].numpy().tolist() == [0.4, 0.6]
    assert MIXING not in other.arrays
    table = other.arrays[LABEL_TABLE][LABEL_TABLE].numpy()
    assert table == pytest.approx(np.array([[3 / 4, 1 / 4], [1 / 3, 2 / 3]]))


def test_a_round_by_hand() -> None:
    made = made_of(3)
    for client in ("c0", "c1", "c2"):
        made.on_answer(answer(client, [[5, 0], [0, 5]]))
    made.scheduling.state.running = True
    works = []
    for number in range(2):
        works.append(made.request_for("c0"))
        made.scheduling.work_again("c0")
        task = InFlight(number, "c0", works[-1].models[0], 0, 0, 0.0, 0, kind=TRAIN_WEIGHTED)
        made.scheduling.sent(task, 0.0)
    assert [(work.kind, work.models) for work in works] == [
        (TRAIN_WEIGHTED, (0,)),
        (TRAIN_WEIGHTED, (1,)),
    ]
    assert [work.settings[WEIGHTED_BY] for work in works] == [0, 1]
    assert made.scheduling.next_model("c0") is None
    updates = [
        trained("c0", 0, 10, 1, 0),
        trained("c1", 0, 30, 5, 0),
        trained("c0", 1, 10, 2, 2),
        trained("c1", 1, 10, 4, 4),
    ]
    applied = made.applied(updates)
    # (10 · 1 + 30 · 5) / 40, regardless of the clients' clusters.
    assert made.models[0].vector.tolist() == [4, 0]
    assert made.models[1].vector.tolist() == [3, 3]
    assert [what.weight for what in applied] == [0.25, 0.75, 0.5, 0.5]


def test_clients_without_responsibilities_take_no_part() -> None:
    made = made_of(3)
    made.on_answer(answer("c1", [[5, 0], [0, 5]]))
    online = list(made.progress.fleet.clients.values())
    rng = np.random.default_rng(0)
    assert [client.client_id for client in made._participants(online, rng)] == ["c1"]
    made.state.assigned = {}
    assert len(made._participants(online, rng)) == 3
    assert made.request_for("c0").kind == LABEL_MASSES


@pytest.mark.parametrize(
    ("masses", "examples"),
    [
        ([[5, 0]], 10),
        ([[5, 0], [0, 4]], 10),
        ([[5.5, 0], [0, 4.5]], 10),
        ([[11, 0], [-1, 0]], 10),
        ([[0, 0], [0, 0]], 0),
        ([5, 5], 10),
    ],
)
def test_what_are_no_masses_of_whole_samples_is_refused(masses: Any, examples: int) -> None:
    made = made_of(1)
    with pytest.raises(InvalidReplyError):
        made.on_answer(answer("c0", masses, examples))
    assert not made.state.masses


def test_every_participant_trains_every_model_in_every_round() -> None:
    seen = run_on(FedRC(FedRCParameters(k=3)), three_groups(), 36)
    applied = of(events.UpdateApplied, seen)
    assert len(applied) == 36
    assert len({(event.client, event.cluster) for event in applied}) == 36


def test_it_can_be_restored() -> None:
    check_it_can_be_restored(FedRC)
