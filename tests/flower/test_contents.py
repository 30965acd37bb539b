"""What is kept of messages that were handed out."""

from __future__ import annotations

from flwr.app import Message, RecordDict

from raceme.flower.link_state import Contents
from raceme.flower.messages import SERVER_NODE_ID, identify_process


def test_the_latest_messages_are_kept_until_they_are_too_many_bytes() -> None:
    identify_process(1, SERVER_NODE_ID)
    contents = Contents(most_bytes=10)
    sent = {name: Message(RecordDict(), 1, "train") for name in "abcd"}
    for name, message in sent.items():
        contents.put(name, message, 4)
    # What waits for its node is kept, however much it is.
    assert all(name in contents for name in sent)
    for name in "abc":
        assert contents.hand_out(name) is sent[name]
    assert "a" not in contents
    assert contents.hand_out("a") is None
    assert contents.hand_out("b") is sent["b"]
    contents.drop("b")
    contents.drop("nobody")
    # 4 of c and 4 of d: there is room again.
    assert contents.hand_out("d") is sent["d"]
    assert contents.get("c") is sent["c"]
