"""The ClientApp."""

import warnings

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

app = ClientApp()


def load_data(context: Context):
    """Return the training and the test half of a partition of the digits."""
    part, parts = context.node_config["partition-id"], context.node_config["num-partitions"]
    features, labels = load_digits(return_X_y=True)
    features, labels = features[part::parts] / 16, labels[part::parts]
    half = len(labels) // 2
    return (features[:half], labels[:half]), (features[half:], labels[half:])


def set_model(msg: Message, context: Context) -> LogisticRegression:
    """Return the model that was sent."""
    model = LogisticRegression(C=context.run_config["penalty"], max_iter=2, warm_start=True)
    model.coef_, model.intercept_ = msg.content["arrays"].to_numpy_ndarrays()
    model.classes_ = np.arange(10)
    return model


@app.train()
def train(msg: Message, context: Context):
    """Fit on the local data."""
    (features, labels), _ = load_data(context)
    model = set_model(msg, context)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(features, labels)
    metrics = MetricRecord({"num-examples": len(labels)})
    arrays = ArrayRecord([model.coef_, model.intercept_])
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Test on the local data."""
    _, (features, labels) = load_data(context)
    model = set_model(msg, context)
    metrics = {
        "num-examples": len(labels),
        "test_logloss": log_loss(labels, model.predict_proba(features), labels=range(10)),
        "accuracy": model.score(features, labels),
    }
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
