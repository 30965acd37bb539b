"""The ServerApp."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from torch_quickstart.task import Net, load_data, test

app = ServerApp()


class InOrder(FedAvg):
    """FedAvg that sums models up in the order of the partitions, not of their arrival."""

    def aggregate_train(self, server_round, replies):
        """Sort the replies."""
        replies = sorted(replies, key=lambda reply: reply.content["metrics"]["partition-id"])
        return super().aggregate_train(server_round, replies)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, test on the server after each round, and save the model."""
    torch.manual_seed(0)
    kind = InOrder if context.run_config["in-order"] else FedAvg
    strategy = kind(fraction_train=context.run_config["fraction-train"])
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
        num_rounds=context.run_config["num-server-rounds"],
        evaluate_fn=global_evaluate,
    )
    torch.save(result.arrays.to_torch_state_dict(), context.run_config["model-file"])


def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Test on data of the server's own."""
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = test(model, load_data(99, 1)[1])
    return MetricRecord({"accuracy": accuracy, "loss": loss})
