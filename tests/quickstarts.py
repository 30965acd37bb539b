"""Flower apps after Flower's quickstarts: PyTorch, scikit-learn, numpy.

They do not use Raceme. Clients of even and of odd partitions have different labels.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from torch import nn

CLASSES, INPUTS = 4, 6


def samples(context: Context, count: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """A client's samples: clouds around class centres; odd partitions permute the labels."""
    partition = int(context.node_config["partition-id"])
    rng = np.random.default_rng([7, partition])
    centres = np.random.default_rng(1).normal(size=(CLASSES, INPUTS)) * 2
    labels = np.arange(count) % CLASSES
    inputs = centres[labels] + rng.normal(size=(count, INPUTS)) * 0.5
    if partition % 2:
        labels = CLASSES - 1 - labels
    return inputs.astype(np.float32), labels


class Net(nn.Module):
    """A small network with batch normalisation, whose buffers include integers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(INPUTS, 12)
        self.bn1 = nn.BatchNorm1d(12)
        self.fc2 = nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.bn1(self.fc1(x))))


def initial_net() -> ArrayRecord:
    torch.manual_seed(0)
    return ArrayRecord(Net().state_dict())


def torch_app(mods: list | None = None) -> ClientApp:
    """The app of Flower's quickstart-pytorch."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model = Net()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        x, y = map(torch.tensor, samples(context))
        optimizer = torch.optim.SGD(model.parameters(), lr=msg.content["config"]["lr"])
        model.train()
        total = 0.0
        for _ in range(5):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        model_record = ArrayRecord(model.state_dict())
        metrics = {"train_loss": total / 5, "num-examples": len(y)}
        content = RecordDict({"arrays": model_record, "metrics": MetricRecord(metrics)})
        return Message(content=content, reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        model = Net()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        model.eval()
        x, y = map(torch.tensor, samples(context))
        with torch.no_grad():
            outputs = model(x)
        metrics = {
            "eval_loss": nn.functional.cross_entropy(outputs, y).item(),
            "eval_acc": (outputs.argmax(1) == y).float().mean().item(),
            "num-examples": len(y),
        }
        content = RecordDict({"metrics": MetricRecord(metrics)})
        return Message(content=content, reply_to=msg)

    return app


def initial_regression() -> ArrayRecord:
    """Coefficients of scikit-learn's model, float64, named by numbers."""
    return ArrayRecord([np.zeros((CLASSES, INPUTS)), np.zeros(CLASSES)])


def _regression(msg: Message) -> LogisticRegression:
    model = LogisticRegression(penalty="l2", max_iter=1, warm_start=True, solver="lbfgs")
    model.classes_ = np.arange(CLASSES)
    model.coef_, model.intercept_ = (a.copy() for a in msg.content["arrays"].to_numpy_ndarrays())
    return model


def sklearn_app() -> ClientApp:
    """The app of Flower's sklearn-logreg-mnist."""
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model, (x, y) = _regression(msg), samples(context)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=ConvergenceWarning)
            warnings.simplefilter("ignore", category=FutureWarning)
            model.fit(x, y)
        arrays = ArrayRecord([model.coef_, model.intercept_])
        metrics = MetricRecord({"num-examples": len(x), "train_logloss": 0.5})
        content = RecordDict({"arrays": arrays, "metrics": metrics})
        return Message(content=content, reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        model, (x, y) = _regression(msg), samples(context)
        metrics = MetricRecord(
            {"num-examples": len(x), "test_logloss": 0.4, "accuracy": model.score(x, y)}
        )
        return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)

    return app


def initial_numpy() -> ArrayRecord:
    return ArrayRecord([np.zeros((3, 3)), np.zeros(3)])


def numpy_app(spoil: Callable[[Message, Context], None] | None = None) -> ClientApp:
    """The app of Flower's quickstart-numpy: the model is an array, and the metric its distance."""
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        arrays = msg.content["arrays"].to_numpy_ndarrays()
        target = 1.0 if int(context.node_config["partition-id"]) % 2 else -1.0
        moved = [array + 0.5 * (target - array) for array in arrays]
        metrics = MetricRecord({"num-examples": 10})
        content = RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics})
        reply = Message(content=content, reply_to=msg)
        if spoil is not None:
            spoil(reply, context)
        return reply

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        arrays = msg.content["arrays"].to_numpy_ndarrays()
        target = 1.0 if int(context.node_config["partition-id"]) % 2 else -1.0
        loss = float(np.mean([np.mean((array - target) ** 2) for array in arrays]))
        metrics = MetricRecord({"loss": loss, "num-examples": 10})
        return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)

    return app


CONFIG = ConfigRecord({"lr": 0.1})


def load_net(arrays: ArrayRecord) -> Net:
    """Load a result as users do; fails on names or shapes that differ from the network's."""
    net = Net()
    net.load_state_dict(OrderedDict(arrays.to_torch_state_dict()))
    return net
