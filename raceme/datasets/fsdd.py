"""Free Spoken Digit Dataset: ten digits, spoken by a few people."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.datasets.npz_folder import NpzFolder, standardised
from raceme.datasets.source import Dataset

_WINDOW_AXES = 3


class Fsdd(NpzFolder):
    """Spoken digits (FSDD): log-mel spectra of a few speakers, each of several clients.

    Jackson, "Free Spoken Digit Dataset", https://github.com/Jakobovski/free-spoken-digit-dataset.
    """

    default_model = "cnn"
    default_lr = 0.05
    target_accuracy = 0.9
    default_clients = 24
    inner = ("fsdd_by_speaker", "fsdd")

    def load(self, config: RunConfig) -> Dataset:
        """Return the recordings as images of one channel; the speaker is a client's true group.

        The clients are divided evenly among the speakers, in order; those of a speaker have its
        recordings in turn, so that each has as many of every digit.
        """
        whole = self._unscaled(config, None)
        assert whole.users is not None
        if whole.target or whole.x.ndim != _WINDOW_AXES or whole.test_users is not None:
            raise UserError(
                f"{config.data_root} holds no spectra of speakers: expected x of shape "
                "(recordings, bands, times). Take dataset npz-folder for other data."
            )
        speakers = len(whole.users)
        if config.num_clients < speakers:
            raise UserError(
                f"fsdd has {speakers} speakers, of whom each is at least one client: take at "
                f"least {speakers} clients, got {config.num_clients}."
            )
        sharers = np.array_split(np.arange(config.num_clients), speakers)
        parts = [
            (own[number :: len(clients)], speaker)
            for speaker, (own, clients) in enumerate(zip(whole.users, sharers, strict=True))
            for number in range(len(clients))
        ]
        if min(len(own) for own, _ in parts) < 2:
            raise UserError(
                f"fsdd has too few recordings for {config.num_clients} clients: take fewer."
            )
        return standardised(
            replace(
                whole,
                x=whole.x[:, np.newaxis],
                users=tuple(own for own, _ in parts),
                groups=tuple(speaker for _, speaker in parts),
            )
        )

    def count_clients(self, config: RunConfig) -> int:
        """Return the number of clients of a run that names none."""
        return self.default_clients
