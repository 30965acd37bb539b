"""A user's own network and samples with Raceme's kinds of work."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from torch import nn

from raceme.client_app import AddedKinds
from raceme.core.errors import UserError
from raceme.flower.messages import identify_process
from raceme.training.clients import OwnData

X, Y = np.zeros((4, 3)), np.array([0, 1, 2, 1])


def context(node: int = 5, **config: int) -> Context:
    return Context(1, node, dict(config), RecordDict(), {})


def test_a_client_may_have_arrays_or_tensors() -> None:
    data = OwnData(nn.Linear(3, 3), torch.zeros(4, 3), torch.tensor(Y), X, Y, lr=0.5)
    client = data.client(context(**{"partition-id": 2}))
    assert (client.id, client.num_classes, len(client.train)) == ("client-2", 3, 4)
    assert client.config.lr == 0.5
    assert client.train.x.dtype == torch.float32
    assert data.client(context()).id == "node-5"
    named = OwnData(nn.Linear(3, 3), X, Y, X, Y, client_id="kitchen")
    assert named.client(context()).id == "kitchen"


@pytest.mark.parametrize(("x", "y"), [(X[:3], Y), (X[:0], Y[:0]), (X, Y - 1), (X, Y.reshape(2, 2))])
def test_samples_that_do_not_fit_are_reported(x: np.ndarray, y: np.ndarray) -> None:
    with pytest.raises(UserError, match="OwnData: x_test and y_test must have equal lengths"):
        OwnData(nn.Linear(3, 3), X, Y, x, y).client(context())


def test_messages_without_a_kind_are_left_to_the_user() -> None:
    identify_process()
    loaded: list[int] = []

    def load(node: Context) -> OwnData:
        loaded.append(node.node_id)
        return OwnData(nn.Linear(3, 3), X, Y, X, Y)

    kinds = AddedKinds(load)

    def ask(**settings: str) -> Message:
        content = RecordDict({"config": ConfigRecord(dict(settings))})
        return Message(content, dst_node_id=5, message_type="train")

    own: list[Message] = []
    for message in (ask(), ask(kind="train"), Message(RecordDict(), 5, "evaluate")):
        kinds(message, context(), lambda m, c: own.append(m) or m)
        assert own.pop() is message
    assert not loaded
    reply = kinds(ask(kind="label-counts"), context(), lambda m, c: pytest.fail("not the user's"))
    np.testing.assert_array_equal(reply.content["numbers"]["label-counts"].numpy(), [1, 2, 1])
    kinds.answer(Message(RecordDict(), 5, "query"), context())
    assert loaded == [5]
