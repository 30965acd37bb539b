"""What is kept of messages that were handed out."""

from __future__ import annotations

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict

from raceme.flower.link_state import MessageCache
from raceme.flower.messages import SERVER_NODE_ID, identify_process


def test_the_latest_messages_are_kept_until_they_are_too_many_bytes() -> None:
    identify_process(1, SERVER_NODE_ID)
    content = RecordDict({"arrays": ArrayRecord([np.zeros(4, np.int8)])})
    size = content["arrays"].count_bytes()
    cache = MessageCache(most_bytes=2 * size + 1)
    sent = {name: Message(content, 1, "train") for name in "abcd"}
    for name, message in sent.items():
        cache.put(name, message)
    # What waits for its node is kept, however much it is.
    assert all(name in cache for name in sent)
    for name in "abc":
        assert cache.hand_out(name) is sent[name]
    assert "a" not in cache
    assert cache.hand_out("a") is None
    assert cache.hand_out("b") is sent["b"]
    cache.drop("b")
    cache.drop("unknown")
    # Those of c and of d: there is room again.
    assert cache.hand_out("d") is sent["d"]
    assert cache.get("c") is sent["c"]
