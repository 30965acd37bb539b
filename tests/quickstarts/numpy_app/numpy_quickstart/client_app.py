"""The ClientApp."""

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from numpy_quickstart.task import load_data, test
from numpy_quickstart.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    """Train on the local data; count the rounds that this client took part in."""
    partition_id = context.node_config["partition-id"]
    features, targets = load_data(partition_id, context.node_config["num-partitions"])
    (weights,) = msg.content["arrays"].to_numpy_ndarrays()
    rounds = context.state.metric_records.get("seen", MetricRecord({"rounds": 0}))["rounds"] + 1
    context.state["seen"] = MetricRecord({"rounds": rounds})
    weights = train_fn(
        weights,
        features,
        targets,
        epochs=context.run_config["local-epochs"],
        lr=context.run_config["learning-rate"],
        seed=[partition_id, msg.content["config"]["server-round"]],
    )
    metrics = {
        "train_loss": test(weights, features, targets),
        "num-examples": len(targets),
        "rounds": rounds,
    }
    content = RecordDict(
        {"arrays": ArrayRecord([weights]), "metrics": MetricRecord(metrics)},
    )
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Test on the local data."""
    features, targets = load_data(
        context.node_config["partition-id"], context.node_config["num-partitions"]
    )
    (weights,) = msg.content["arrays"].to_numpy_ndarrays()
    metrics = {"eval_loss": test(np.asarray(weights), features, targets), "num-examples": 20}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
