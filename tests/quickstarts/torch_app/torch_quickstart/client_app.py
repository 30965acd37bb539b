"""The ClientApp."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from torch_quickstart.task import Net, load_data
from torch_quickstart.task import test as test_fn
from torch_quickstart.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    """Train the model on local data."""
    partition_id = context.node_config["partition-id"]
    trainloader, _ = load_data(partition_id, context.node_config["num-partitions"])
    torch.manual_seed(100 * msg.content["config"]["server-round"] + partition_id)
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loss = train_fn(
        model, trainloader, context.run_config["local-epochs"], msg.content["config"]["lr"]
    )
    metrics = {
        "train_loss": loss,
        "num-examples": len(trainloader.dataset),
        "partition-id": partition_id,
    }
    content = RecordDict(
        {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    )
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Evaluate the model on local data."""
    _, testloader = load_data(
        context.node_config["partition-id"], context.node_config["num-partitions"]
    )
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loss, accuracy = test_fn(model, testloader)
    metrics = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(testloader.dataset)}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
