"""The ServerApp."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from numpy_quickstart.task import FEATURES

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train with FedAvg and save the result."""
    strategy = FedAvg(fraction_train=context.run_config["fraction-train"])
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord([np.zeros(FEATURES)]),
        num_rounds=context.run_config["num-server-rounds"],
    )
    np.savez("final_model.npz", *result.arrays.to_numpy_ndarrays())
