"""Plato: a server and a process for each client of a round, over sockets on this machine.

A round has as many clients as `--processes`, since ten processes would compete for two cores.
"""

from __future__ import annotations

import os
import socket
import sys

import work

_CONFIGURATION = """
clients: {{type: simple, total_clients: {clients}, per_round: {per_round}, do_test: false}}
server: {{address: 127.0.0.1, port: {port}, do_test: false, random_seed: 1}}
data: {{datasource: MNIST, sampler: iid, partition_size: {samples}, random_seed: 1}}
trainer:
  type: basic
  model_name: small_cnn
  rounds: {rounds}
  epochs: 1
  batch_size: {batch}
  optimizer: SGD
algorithm: {{type: fedavg}}
parameters: {{optimizer: {{lr: {lr}, momentum: 0.0, weight_decay: 0.0}}}}
results: {{types: "round, elapsed_time"}}
"""


def main() -> None:
    """Run the benchmark."""
    job, watch = work.start()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    configuration = job.folder / "plato.yml"
    configuration.write_text(
        _CONFIGURATION.format(
            clients=work.CLIENTS,
            per_round=job.processes,
            samples=work.SAMPLES,
            batch=work.BATCH,
            lr=work.LEARNING_RATE,
            rounds=(job.warm_up + job.updates) // job.processes,
            port=port,
        )
    )
    # Plato parses the command line when it is imported, in every process.
    sys.argv[1:] = ["-c", str(configuration), "-b", str(job.folder), "-u", "-l", "error"]
    import plato_parties

    os.environ[plato_parties.DATA_ROOT] = str(job.data_root)
    plato_parties.serve(watch)


if __name__ == "__main__":
    main()
