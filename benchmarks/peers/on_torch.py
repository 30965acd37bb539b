"""A plain torch loop without a framework: FedAvg, client after client, in one process."""

from __future__ import annotations

import copy

import torch
import work
from torch.nn.functional import cross_entropy


def main() -> None:
    """Run the benchmark."""
    job, watch = work.start()
    held, server = work.clients(job.data_root), work.network()
    generator = torch.Generator().manual_seed(0)
    for number in range(1, job.rounds + 1):
        total = [torch.zeros_like(parameter) for parameter in server.parameters()]
        for client in torch.randperm(work.CLIENTS, generator=generator)[: work.PER_ROUND].tolist():
            x, y = held[client]
            local = copy.deepcopy(server)
            optimiser = torch.optim.SGD(local.parameters(), lr=work.LEARNING_RATE)
            for batch in torch.randperm(len(y), generator=generator).split(work.BATCH):
                optimiser.zero_grad()
                cross_entropy(local(x[batch]), y[batch]).backward()
                optimiser.step()
            with torch.no_grad():
                for summed, parameter in zip(total, local.parameters(), strict=True):
                    summed.add_(parameter, alpha=1 / work.PER_ROUND)
        with torch.no_grad():
            for parameter, summed in zip(server.parameters(), total, strict=True):
                parameter.copy_(summed)
        watch.note(number * work.PER_ROUND)
    watch.write(torch.__version__, server.parameters())


if __name__ == "__main__":
    main()
