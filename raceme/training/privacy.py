"""Local differential privacy of a device: Flower's mod around training, and what it has no say in.

The owner of a device switches it on, in the node configuration, which no server can change::

    raceme device ... --node-config "local-dp-epsilon=50 local-dp-clip=1.0"

Every trained model then leaves the device clipped, relative to the received one, and with Gaussian
noise on every weight: Flower's ``LocalDpMod``. Any two updates of a device are at most twice the
clipping norm apart, so this is the sensitivity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp.mod import LocalDpMod
from flwr.clientapp.typing import ClientAppCallable

from raceme.core import messages as names
from raceme.core.messages import Role

EPSILON, DELTA, CLIP, SEED = "local-dp-epsilon", "local-dp-delta", "local-dp-clip", "local-dp-seed"
"""Keys of a node's configuration."""
_ALLOWED = frozenset({names.TRAIN, names.EVALUATE, names.TEST_STEPS, names.DESCRIBE})
_PREFIX = "local-dp-"
_DEFAULT_DELTA = 1e-5
_DEFAULT_CLIP = 1.0


@dataclass(frozen=True)
class LocalPrivacy:
    """What a device asks for.

    Attributes
    ----------
    epsilon, delta : float
        Budget of one update, by which Flower's mod chooses the noise; see :meth:`spent`.
    clip : float
        Longest update, the Euclidean norm of the change of all weights.
    seed : int or None
        Of the noise, for simulations that are to be repeated; noise that can be guessed hides
        nothing. None: numpy's own, which the operating system seeds.
    """

    epsilon: float
    delta: float = _DEFAULT_DELTA
    clip: float = _DEFAULT_CLIP
    seed: int | None = None

    @property
    def sensitivity(self) -> float:
        """Largest distance between two updates."""
        return 2.0 * self.clip

    def spent(self, updates: int) -> float:
        """Return the ε that so many updates of one device really spend together, at this δ.

        The noise is σ = Δ √(2 ln(1.25/δ)) / ε, which gives ε only up to ε = 1. What Gaussian noise
        gives is known exactly (Balle and Wang, ICML 2018, theorem 8): with μ = √k Δ/σ for k
        updates, δ = Φ(μ/2 − ε/μ) − exp(ε) Φ(−μ/2 − ε/μ).
        """
        # A device, which only adds the noise, is installed without scipy.
        from scipy.optimize import brentq
        from scipy.special import log_ndtr, ndtr

        noise = math.sqrt(2.0 * math.log(1.25 / self.delta)) / self.epsilon
        mu = math.sqrt(updates) / noise

        def excess(epsilon: float) -> float:
            low = math.exp(min(0.0, epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))))
            return float(ndtr(mu / 2 - epsilon / mu)) - low - self.delta

        high = mu * mu / 2 + mu * math.sqrt(2.0 * math.log(1.0 / self.delta)) + 1.0
        return float(brentq(excess, 0.0, high)) if excess(0.0) > 0 else 0.0


def privacy_of(context: Context) -> LocalPrivacy | None:
    """Return what the node configuration asks for; None without ``local-dp-epsilon``.

    Raises
    ------
    ValueError
        A number is none, or out of range; or a key is misspelt.
    """
    config = context.node_config
    # A slip of the pen must not mean no privacy.
    stated = {key for key in config if key.startswith(_PREFIX)}
    if foreign := sorted(stated - {EPSILON, DELTA, CLIP, SEED}):
        raise ValueError(f"Unknown {', '.join(foreign)}: valid are {EPSILON}, {DELTA}, {CLIP}.")
    if EPSILON not in config:
        unused = sorted(key for key in (DELTA, CLIP, SEED) if key in config)
        if unused:
            raise ValueError(f"{', '.join(unused)} without {EPSILON}: nothing would be private.")
        return None
    epsilon, delta, clip = (
        _positive(context, key, default)
        for key, default in ((EPSILON, 0.0), (DELTA, _DEFAULT_DELTA), (CLIP, _DEFAULT_CLIP))
    )
    if delta >= 1:
        raise ValueError(f"{DELTA} must be below 1, got {delta:g}.")
    seed = config.get(SEED)
    if seed is not None and (not isinstance(seed, int) or seed < 0):
        raise ValueError(f"{SEED} must be a whole number of at least 0, got {seed!r}.")
    return LocalPrivacy(epsilon, delta, clip, seed)


def check_kind(kind: str, context: Context) -> None:
    """Refuse work whose answer would leave a private device without noise.

    Raises
    ------
    ValueError
        It is such.
    """
    if privacy_of(context) is not None and kind not in _ALLOWED:
        allowed = ", ".join(sorted(_ALLOWED))
        raise ValueError(
            f"This device has local differential privacy and does no work of the kind '{kind}', "
            f"whose answers no noise is added to; it does {allowed}."
        )


def local_dp(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Clip what training brings, and add noise, if the device asks for it: a mod of Flower's.

    Of the measurements only the number of examples is kept, which the greeting has told already.

    Raises
    ------
    ValueError
        The device's numbers are none, or the model has arrays that only count.
    """
    privacy = privacy_of(context)
    if privacy is None:
        return call_next(message, context)
    for record in message.content.array_records.values():
        for name, array in record.items():
            if Role.of(name, array.dtype) is Role.COUNTER:
                raise ValueError(f"Noise on '{name}', which only counts, is no privacy.")
    mod = LocalDpMod(privacy.clip, privacy.sensitivity, privacy.epsilon, privacy.delta)
    if privacy.seed is None:
        reply = mod(message, context, call_next)
    else:
        before = np.random.get_state()
        np.random.seed(_seed_of(privacy.seed, message))
        try:
            reply = mod(message, context, call_next)
        finally:
            np.random.set_state(before)
    if not reply.has_error():
        for name, metrics in list(reply.content.metric_records.items()):
            kept = {key: value for key, value in metrics.items() if key == names.NUM_EXAMPLES}
            reply.content[name] = MetricRecord(kept)
    return reply


def _seed_of(seed: int, message: Message) -> int:
    """Return the seed of the noise on the answer to one message."""
    settings = message.content.config_records.get(names.CONFIG) or ConfigRecord()
    number = settings.get(names.TASK, 0)
    parts = [seed, message.metadata.dst_node_id, number if isinstance(number, int) else 0]
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def _positive(context: Context, key: str, default: float) -> float:
    value = context.node_config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise ValueError(f"{key} must be a number above 0, got {value!r}.")
    return float(value)
