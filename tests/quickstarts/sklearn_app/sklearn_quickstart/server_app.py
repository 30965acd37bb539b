"""The ServerApp."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Average the coefficients."""
    result = FedAvg(fraction_train=context.run_config["fraction-train"]).start(
        grid=grid,
        initial_arrays=ArrayRecord([np.zeros((10, 64)), np.zeros(10)]),
        num_rounds=context.run_config["num-server-rounds"],
    )
    print("last round:", result.evaluate_metrics_clientapp[3])
