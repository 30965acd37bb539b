"""Flower's own Ray engine with Flower's own FedAvg, one process per core."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.metadata import version

import flower_client
import work
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation


class Timed(FedAvg):
    """Flower's FedAvg that notes the time after each round."""

    watch: work.Watch
    done = 0

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the round's models."""
        arrived = list(replies)
        averaged = super().aggregate_train(server_round, arrived)
        self.done += sum(not reply.has_error() for reply in arrived)
        self.watch.note(self.done)
        return averaged


def main() -> None:
    """Run the benchmark."""
    job, watch = work.start()
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    os.environ[flower_client.DATA_ROOT] = str(job.data_root)
    app = flower_client.idle if job.method == "idle" else flower_client.training
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = Timed(
            fraction_train=job.warm_up / work.CLIENTS,
            fraction_evaluate=0.0,
            min_train_nodes=job.warm_up,
            min_available_nodes=work.CLIENTS,
        )
        strategy.watch = watch
        result = strategy.start(
            grid, ArrayRecord(work.network().state_dict()), num_rounds=job.rounds
        )
        weights = result.arrays.to_torch_state_dict().values()
        watch.write(version("flwr"), () if job.method == "idle" else weights)

    run_simulation(
        server_app=server,
        client_app=app,
        num_supernodes=work.CLIENTS,
        backend_config={
            "init_args": {"num_cpus": job.processes},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    main()
