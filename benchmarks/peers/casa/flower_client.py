"""The ClientApp of ``on_flower.py``, which Flower's Ray workers import."""

from __future__ import annotations

from functools import cache

import method
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
clients = cache(method.clients)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received model for one epoch."""
    torch.set_num_threads(1)
    task = message.content["task"]
    data = clients(task["seed"])[0][task["client"]]
    model = method.network()
    vector = torch.from_numpy(message.content["model"].to_numpy_ndarrays()[0].copy())
    torch.nn.utils.vector_to_parameters(vector, model.parameters())
    optimiser = torch.optim.SGD(model.parameters(), lr=method.RATE)
    for batch in torch.randperm(len(data.y)).split(method.BATCH):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(data.x[batch]), data.y[batch]).backward()
        optimiser.step()
    vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    content = RecordDict({"model": ArrayRecord([vector.numpy()])})
    return Message(content, reply_to=message)
