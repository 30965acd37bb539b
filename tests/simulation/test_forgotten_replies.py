"""The simulator: replies that nobody wants any more."""

import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from test_virtual_grid import arrival, grid_of, query, train

from raceme.simulation import Device


def counting_app(state: bool) -> tuple[ClientApp, list[int]]:
    """An app that notes which node works; with `state` clients remember how often they did."""
    app, worked = ClientApp(), []

    @app.train()
    @app.query()
    def answer(message: Message, context: Context) -> Message:
        worked.append(context.node_id)
        count = worked.count(context.node_id)
        if state:
            context.state["count"] = MetricRecord({"n": count})
        return Message(RecordDict({"metrics": MetricRecord({"n": count})}), reply_to=message)

    return app, worked


def test_a_forgotten_reply_never_comes_and_is_not_kept() -> None:
    grid = grid_of(*[Device(seconds_per_round=float(seconds)) for seconds in (1, 2, 3)])
    here, open_, wanted = grid.push_messages([train(1), train(2), train(3)])
    assert grid.wait([], until=1.5) == []
    grid.forget([here, open_, "unknown"])
    assert [r.metadata.src_node_id for r in grid.wait([here, open_, wanted])] == [3]
    assert list(grid.pull_messages([here, open_])) == []
    assert grid.wait([here, open_]) == []
    assert grid.now() == 3.0
    tree = grid.state_dict()
    assert tree["arrived"] == tree["pending"] == tree["queue"]["events"] == []


def test_a_forgotten_task_keeps_its_device_busy_and_is_not_worked_on() -> None:
    app, worked = counting_app(state=False)
    grid = grid_of(Device(seconds_per_round=4.0), app=app)
    (lost,) = grid.push_messages([train(1)])
    grid.forget([lost])
    assert arrival(grid, train(1)) == 8.0
    assert worked == [1]


def test_where_clients_keep_a_state_a_forgotten_task_changes_it() -> None:
    app, worked = counting_app(state=True)
    grid = grid_of(Device(seconds_per_round=4.0), Device(), app=app)
    assert arrival(grid, query(2)) == 0.0
    slow, again = grid.push_messages([train(1), train(1)])
    grid.forget([slow])
    assert list(grid.pull_messages([slow])) == []
    (reply,) = grid.pull_messages([again])
    assert (grid.now(), reply.content["metrics"]["n"]) == (8.0, 2)
    assert worked == [2, 1, 1]
    assert grid.state_dict()["arrived"] == []


def test_a_forgotten_task_is_over_when_its_device_goes_offline() -> None:
    app, worked = counting_app(state=True)
    grid = grid_of(Device(seconds_per_round=4.0, online=((0, 3), (5, 99))), Device(), app=app)
    assert arrival(grid, query(2)) == 0.0
    (slow,) = grid.push_messages([train(1)])
    grid.forget([slow])
    assert grid.wait([]) == grid.wait([]) == []
    assert arrival(grid, train(1)) == 9.0
    assert worked == [2, 1]
    assert grid.state_dict()["pending"] == []


@pytest.mark.parametrize("state", [False, True])
def test_a_saved_grid_remembers_what_was_forgotten(state: bool) -> None:
    def restored(at: float) -> list[tuple[float, int, int]]:
        app, worked = counting_app(state)
        grid = grid_of(Device(seconds_per_round=4.0, jitter=0.5), Device(), app=app)
        list(grid.pull_messages(grid.push_messages([query(2)])))
        ids = list(grid.push_messages([train(1), train(1), train(2)]))
        grid.forget(ids[:1])
        assert grid.wait([], until=at) == []
        tree = grid.state_dict()
        grid = grid_of(Device(seconds_per_round=4.0, jitter=0.5), Device(), app=app)
        grid.load_state_dict(tree)
        assert grid.keeps_messages
        replies = [reply for _ in (1, 2) for reply in grid.pull_messages(ids)]
        assert {reply.metadata.reply_to_message_id for reply in replies} == set(ids[1:])
        return [(grid.now(), r.metadata.src_node_id, worked.count(1)) for r in replies]

    assert restored(0.0) == restored(1.0) != []


def test_replies_that_nobody_fetched_come_in_the_order_of_their_arrival() -> None:
    grid = grid_of(*[Device(seconds_per_round=float(seconds)) for seconds in (3, 1, 2, 4)])
    ids = list(grid.push_messages([train(node) for node in (1, 2, 3, 4)]))
    assert grid.wait([], until=3.5) == []
    # Three lie there: two wanted ones are looked up, of four the three are gone through.
    assert [r.metadata.src_node_id for r in grid.wait([ids[0], ids[1]])] == [2]
    assert [r.metadata.src_node_id for r in grid.wait(ids)] == [3]
    assert [r.metadata.src_node_id for r in grid.pull_messages(ids)] == [1]


def test_waiting_looks_at_no_reply_that_it_does_not_want() -> None:
    class Wanted(list[str]):
        """Ids that are counted when they are compared with others."""

        asked = 0

        def __contains__(self, key: object) -> bool:
            self.asked += 1
            return super().__contains__(key)

    grid = grid_of(Device())
    given_up = list(grid.push_messages([query(1) for _ in range(1000)]))
    assert grid.wait([], until=1.0) == []
    wanted = Wanted(grid.push_messages([query(1)]))
    assert len(grid.wait(wanted)) == 1
    assert wanted.asked < 5
    assert len(list(grid.pull_messages(given_up))) == 1000
