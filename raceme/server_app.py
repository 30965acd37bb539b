"""Flower's ServerApp: the same strategies on Flower's Ray engine, or on real devices over gRPC."""

from __future__ import annotations

import logging
import sys

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from raceme.core.config import RunConfig
from raceme.core.errors import PlainFormatter, show_log, shown_by_flower
from raceme.core.identities import ON_TRUST
from raceme.core.installation import check_versions
from raceme.core.signals import StopRequest, end_with_parent
from raceme.flower.grid import has_devices, parent_pid
from raceme.reporting.artefacts import missing_line
from raceme.reporting.console import RunProgress
from raceme.runs import experiment

_ORPHAN_SECONDS = 20.0
"""Time for a lost SuperLink to return before the run ends."""

app = ServerApp()


@app.main()
@shown_by_flower()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy of the run config and write its artefacts.

    The keys are those of `raceme run`; those of simulated devices have no effect.
    """
    check_versions()
    # Flower shows the output of a ServerApp.
    show_log(sys.stderr, PlainFormatter("%(levelname)s: %(message)s"))
    parent = parent_pid()
    if parent is not None:
        end_with_parent(parent, _ORPHAN_SECONDS)
    config = experiment.resolve(RunConfig.from_mapping(context.run_config))
    strategy = experiment.build_strategy(config)
    if not config.device_keys and has_devices(grid):
        logging.getLogger("raceme").info(ON_TRUST)
    nodes = len(list(grid.get_node_ids()))
    if 0 < nodes < config.num_clients:
        logging.getLogger("raceme").warning(
            "clients=%d, but %d node%s here: the samples of the others are not used. Set clients, "
            "or the number of SuperNodes.",
            config.num_clients,
            nodes,
            " is" if nodes == 1 else "s are",
        )
    with (
        StopRequest() as stop,
        RunProgress(max_updates=config.planned_updates, each_update=True) as progress,
    ):
        outcome = experiment.execute(config, strategy, grid, progress.observe, stop=stop)
    log = logging.getLogger("raceme")
    if outcome.unwritten:
        log.error("%s", missing_line(outcome.out, outcome.unwritten))
    log.info("Results are in %s", outcome.out)
