"""pfl-research: federated averaging on its simulated backend."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import torch
import work
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch.nn.functional import cross_entropy


class Net(torch.nn.Module):
    """The network with the loss and metrics that pfl requires."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = work.network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of the classes."""
        return self.layers(x)

    def loss(self, x: torch.Tensor, y: torch.Tensor, **_: object) -> torch.Tensor:
        """Return the mean loss of a mini-batch."""
        return cross_entropy(self(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor, **_: object) -> dict[str, Weighted]:
        """Return what an evaluation measures."""
        return {"loss": Weighted(float(self.loss(x, y).detach()) * len(y), len(y))}


def main() -> None:
    """Run the benchmark."""
    job, watch = work.start()
    held = work.clients(job.data_root)

    def user(number: int) -> Dataset:
        # As in pfl's examples: mini-batches are slices, so the dataset has to be shuffled here.
        order = torch.from_numpy(np.random.permutation(work.SAMPLES))
        x, y = held[number]
        return Dataset([x[order], y[order]])

    class Timed(TrainingProcessCallback):
        def after_central_iteration(
            self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            watch.note((central_iteration + 1) * work.PER_ROUND)
            return False, Metrics()

    users = get_user_sampler("random", list(range(work.CLIENTS)))
    data = FederatedDataset(user, users)
    module = Net()
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=job.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=work.PER_ROUND,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(data, data),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=work.LEARNING_RATE,
            local_batch_size=work.BATCH,
        ),
        model_eval_params=None,
        callbacks=[Timed()],
    )
    watch.write(version("pfl"), module.parameters())


if __name__ == "__main__":
    main()
