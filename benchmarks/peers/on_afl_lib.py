"""AFL-Lib: its FedAvg and its FedAsync. Its code runs from its own folder, as it requires."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
import work
from environments import SOURCES

SOURCE = "PEERS_SOURCE"
"""Environment variable: the folder with AFL-Lib's code."""


def main() -> None:
    """Run the benchmark."""
    job, watch = work.start()
    held = work.clients(job.data_root)
    os.chdir(os.environ[SOURCE])
    sys.path.insert(0, os.getcwd())
    import alg.base
    from alg import fedasync, fedavg

    # AFL-Lib would read a file per client; the samples are passed in memory instead.
    alg.base.read_client_data = lambda dataset, number, is_train: (
        list(zip(*held[number], strict=True)) if is_train else None
    )
    alg.base.load_model = lambda args: work.network()
    method: Any = {"fedavg": fedavg, "fedasync": fedasync}[job.method]
    args = SimpleNamespace(
        alg=job.method,
        dataset="mnist",
        model="cnn",
        device="cpu",
        lr=work.LEARNING_RATE,
        bs=work.BATCH,
        epoch=1,
        gamma=1.0,
        total_num=work.CLIENTS,
        sr=work.PER_ROUND / work.CLIENTS,
        rnd=job.rounds,
        decay=work.MIXING,
        a=1,
        b=4,
        strategy="constant",
    )
    parties = [method.Client(number, args) for number in range(work.CLIENTS)]
    for party in parties:
        # AFL-Lib's clients hard-code momentum 0.9 and
        # weight decay; the other frameworks use neither.
        party.optim = torch.optim.SGD(party.model.parameters(), lr=work.LEARNING_RATE)
    server = method.Server(0, args, parties)
    at_a_time = work.PER_ROUND if job.method == "fedavg" else 1
    for number in range(job.rounds * work.PER_ROUND // at_a_time):
        server.round = number
        server.run()
        watch.note((number + 1) * at_a_time)
    watch.write(SOURCES["afl_lib"].commit, server.model.parameters())


if __name__ == "__main__":
    main()
