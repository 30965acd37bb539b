"""The process's own random numbers, for ClientApps that draw from them: one seed decides all.

An app may draw from Python's, numpy's and torch's generators, which are one each for a process. In
a simulation several clients and the server share a process, or clients are spread over several;
what one of them draws must not depend on who else is there.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np


def seed_process(entropy: Sequence[int]) -> None:
    """Seed Python's, numpy's and, if it is loaded, torch's generator of this process."""
    words = [int(word) for word in np.random.SeedSequence(entropy).generate_state(3)]
    random.seed(words[0])
    np.random.seed(words[1])
    torch = sys.modules.get("torch")
    if torch is not None:
        # `torch.manual_seed` takes a millisecond where there is no GPU: it keeps the call's trace.
        torch.default_generator.manual_seed(words[2])
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(words[2])


@contextmanager
def own_randomness(entropy: Sequence[int]) -> Iterator[None]:
    """Give what happens meanwhile random numbers of its own, and bring back those from before."""
    torch = sys.modules.get("torch")
    states = random.getstate(), np.random.get_state()
    drawn = torch.get_rng_state() if torch is not None else None
    seed_process(entropy)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch is not None:
            torch.set_rng_state(drawn)
