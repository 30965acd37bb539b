"""Waiting in wall-clock time: polls with growing pauses, on a test clock."""

from collections.abc import Iterable

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from raceme.core.timeline import Resumable, Timeline, WallTimeline, push, timeline_of
from raceme.flower.messages import Run, empty_run, identify_process


class Wall:
    """A clock that only advances while a test sleeps."""

    def __init__(self) -> None:
        self.time = 100.0
        self.pauses: list[float] = []

    def clock(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.time += seconds


class Mailbox(Grid):
    """A grid like Flower's, on which one reply is available from a given time on."""

    def __init__(self, wall: Wall, ready_at: float) -> None:
        identify_process()
        self.wall, self.ready_at, self.polls = wall, ready_at, 0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.polls += 1
        assert list(message_ids) == ["a", "b"]
        is_there = self.wall.time >= self.ready_at
        return iter([Message(RecordDict(), 1, "train")] if is_there else [])

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [message.object_id for message in messages]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return []

    def get_node_ids(self) -> Iterable[int]:
        return []

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def set_run(self, run: object) -> None: ...

    @property
    def run(self) -> Run:
        return empty_run()


def waiting(ready_at: float) -> tuple[Wall, Mailbox, WallTimeline]:
    wall = Wall()
    mailbox = Mailbox(wall, 100.0 + ready_at)
    return wall, mailbox, WallTimeline(mailbox, 0.125, 0.5, wall.clock, wall.sleep)


def test_a_flower_grid_gets_a_wall_clock() -> None:
    timeline = timeline_of(Mailbox(Wall(), 0.0))
    assert isinstance(timeline, WallTimeline)
    assert isinstance(timeline, Timeline)
    assert not timeline.free_evaluation
    assert not timeline.is_virtual
    assert not isinstance(Mailbox(Wall(), 0.0), Resumable)


def test_forgetting_on_a_flower_grid_asks_nothing_of_it() -> None:
    _, mailbox, timeline = waiting(0.0)
    timeline.forget(["a"])
    assert mailbox.polls == 0


def test_time_counts_from_the_start() -> None:
    wall, _, timeline = waiting(0.0)
    assert timeline.now() == 0.0
    wall.time += 7.5
    assert timeline.now() == 7.5


def test_an_available_reply_is_taken_without_a_pause() -> None:
    wall, mailbox, timeline = waiting(0.0)
    assert len(timeline.wait(["a", "b"])) == 1
    assert mailbox.polls == 1
    assert wall.pauses == []


def test_pauses_grow_by_half_up_to_the_longest() -> None:
    wall, mailbox, timeline = waiting(2.0)
    assert len(timeline.wait(["a", "b"])) == 1
    # 0.125 · 1.5^4 = 0.63 > 0.5. After four pauses 1.016 s have passed, after six 2.016 s.
    assert wall.pauses == [0.125, 0.1875, 0.28125, 0.421875, 0.5, 0.5]
    assert mailbox.polls == 7


def test_the_next_wait_begins_with_the_shortest_pause_again() -> None:
    wall, mailbox, timeline = waiting(2.0)
    timeline.wait(["a", "b"])
    wall.pauses.clear()
    mailbox.ready_at = wall.time + 0.125
    timeline.wait(["a", "b"])
    assert wall.pauses == [0.125]


def test_the_last_pause_ends_at_the_deadline_with_one_more_check() -> None:
    wall, mailbox, timeline = waiting(1000.0)
    assert timeline.wait(["a", "b"], until=0.375) == []
    assert wall.pauses == [0.125, 0.1875, 0.0625]
    assert timeline.now() == 0.375
    assert mailbox.polls == 4


def test_a_passed_deadline_still_checks_once() -> None:
    wall, mailbox, timeline = waiting(0.0)
    wall.time += 5.0
    assert len(timeline.wait(["a", "b"], until=1.0)) == 1
    mailbox.ready_at = 1e9
    assert timeline.wait(["a", "b"], until=1.0) == []
    assert wall.pauses == []


def test_waiting_without_messages_only_lets_time_pass() -> None:
    _, mailbox, timeline = waiting(0.0)
    assert timeline.wait([], until=2.0) == []
    assert timeline.now() == 2.0
    assert mailbox.polls == 0


class Virtual(WallTimeline):
    is_virtual = True


def test_on_the_wall_clock_nobody_can_guess_the_id_of_a_message() -> None:
    wall, mailbox, timeline = waiting(0.0)

    def sent(clock: Timeline) -> str | None:
        message = Message(RecordDict(), 1, "query")
        vars(message.metadata)["_created_at"] = 1.0
        return push(mailbox, clock, message)

    assert len({sent(timeline) for _ in range(3)}) == 3
    # Two runs on virtual time are identical.
    virtual = Virtual(mailbox, clock=wall.clock)
    assert len({sent(virtual) for _ in range(3)}) == 1
