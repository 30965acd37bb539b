"""How good uploads are: tests that a client makes beside its work, for reports only.

Li and Zhu ("Client-Driven Federated Learning") test what a client uploads, "client before", and the
model that it gets in return, "client after", both on test data of the mixture that it was trained
on. The latter is known when the client speaks next, with the model that it has from the server.

What a kind of work trains is not changed by these tests. They ask for it by the setting ``scored``.
"""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import ArrayRecord

from raceme.protocol.effort import PASSES_OF_TRAINING
from raceme.protocol.messages import (
    ACCURACY_AFTER,
    ACCURACY_BEFORE,
    FORMER_STEP,
    SAMPLE_PASSES,
    SCORED,
)
from raceme.training.local import epoch_sizes, evaluate
from raceme.training.work import ClientWork, Metric


def score_former(
    work: ClientWork,
    received: ArrayRecord,
    completes: Callable[[int], object] = lambda step: None,
) -> dict[str, Metric]:
    """Test what a client was sent in return for its last upload, on the data of that upload.

    To be called before training: afterwards the client's network holds the received model.

    Parameters
    ----------
    work : ClientWork
        What the client is asked.
    received : ArrayRecord
        The model that it goes on from: the one that was sent, or one made of several.
    completes : Callable
        Does to the client's network, which holds that model, what its tests at a step need.

    Returns
    -------
    dict[str, Metric]
        The accuracy, as a metric of the answer; nothing if it is not asked for, or if the client
        has not uploaded anything yet.
    """
    former = work.former() if work.settings.get(SCORED, False) else None
    if former is None:
        return {}
    work.receive(received)
    completes(int(work.number(FORMER_STEP, 0)))
    return {ACCURACY_AFTER: evaluate(work.client.network, former.test)[0]}


def score_upload(work: ClientWork, forward: int = 0) -> dict[str, Metric]:
    """Test the trained model, which the client's network holds, on the data of its step.

    Parameters
    ----------
    work : ClientWork
        What the client is asked.
    forward : int
        Samples that it passed forward through a network beside training, each model counted.

    Returns
    -------
    dict[str, Metric]
        The accuracy, and the passes of samples that the work took without these tests, as metrics
        of the answer; nothing if it is not asked for.
    """
    if not work.settings.get(SCORED, False):
        return {}
    client = work.client
    trained = epoch_sizes(len(client.train), work.training_settings(), client.network.needs_pairs)
    return {
        ACCURACY_BEFORE: evaluate(client.network, client.test)[0],
        SAMPLE_PASSES: forward + PASSES_OF_TRAINING * sum(trained),
    }
