"""What an actor on a Ray node does: it answers messages with a ClientApp."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from raceme import datasets
from raceme.config import RunConfig, Value
from raceme.config.errors import UserError
from raceme.simulation.transfer import Request, Response
from raceme.simulation.worker import Desk, load


class Started(NamedTuple):
    """How the start of an actor went.

    Attributes
    ----------
    node_id : str
        Ray's id of the node that it is on.
    failure : str
        Why there will be nothing from it; empty if all is well.
    instructions : str
        What of the processor torch uses; sums may differ by it in their last digits.
    data : str
        Fingerprint of the data there; empty if none was asked for.
    """

    node_id: str
    failure: str = ""
    instructions: str = ""
    data: str = ""


class RayWorker:
    """An actor: it keeps the ClientApp, its clients and their data from message to message."""

    def start(
        self,
        target: str,
        seed: int | None,
        log_level: int,
        path: Sequence[str],
        run: Mapping[str, Value] | None,
    ) -> Started:
        """Load the ClientApp.

        Parameters
        ----------
        target : str
            The ClientApp, as ``module:attribute``.
        seed : int, optional
            See :func:`~raceme.simulation.executor.answer`.
        log_level : int
            Of Flower's logger.
        path : Sequence[str]
            Where the simulator finds modules, the ClientApp's among them; looked at here, too.
        run : Mapping[str, Value], optional
            Configuration of a run whose data are needed here.
        """
        import ray

        node_id = ray.get_runtime_context().get_node_id()
        logging.getLogger("flwr").setLevel(log_level)
        sys.path[:] = dict.fromkeys([*path, *sys.path])
        try:
            data = "" if run is None else _data_here(RunConfig.from_mapping(run))
        except UserError as error:
            return Started(node_id, f"has not the data: {error}")
        try:
            app = load(target)
        except (Exception, SystemExit) as error:
            reason = " ".join(str(error).split()) or "no reason given"
            return Started(
                node_id, f"cannot load the ClientApp {target}: {type(error).__name__}: {reason}"
            )
        self._desk = Desk(app, seed)
        torch = sys.modules.get("torch")
        if torch is None:
            return Started(node_id, data=data)
        torch.set_num_threads(1)
        return Started(node_id, "", torch.backends.cpu.get_cpu_capability(), data)

    def respond(self, request: Request, *data: list[bytes]) -> Response:
        """Answer a request whose arrays' data come beside it, one record's after another's."""
        parts = [part for record in data for part in record]
        return self._desk.respond(request._replace(data=parts))


def _data_here(config: RunConfig) -> str:
    """Return the fingerprint of the data on this node, and fetch none: each actor would."""
    found = fingerprint(config.with_values(download=False))
    if config.download:
        # What clients will load counts as something else, and need not be there twice.
        datasets.forget()
    return found


def fingerprint(config: RunConfig) -> str:
    """Return what tells the first client's data from others.

    Raises
    ------
    UserError
        They cannot be loaded.
    """
    data = datasets.client_data(config, 0)
    digest = hashlib.sha256()
    for values in (data.x_train, data.y_train, data.x_test, data.y_test):
        digest.update(f"{values.shape} {values.dtype}".encode() + values.tobytes())
    return digest.hexdigest()
