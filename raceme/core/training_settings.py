"""Settings of local training: the keys of a run, and what messages may state besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from functools import lru_cache
from typing import Any, Self

from raceme.core.errors import UserError
from raceme.core.options import convert, key_of, option


@dataclass(frozen=True)
class TrainingOptions:
    """Keys of every run about local training."""

    lr: float | None = option(
        None, "learning rate of local training (auto: the dataset's default)", above=0
    )
    batch_size: int = option(10, "mini-batch size of local training", low=1)
    local_epochs: int = option(1, "local epochs per update", low=1)
    local_steps: int = option(0, "mini-batches per update, instead of local-epochs (0: off)", low=0)
    optimizer: str = option("sgd", "local optimizer", among=("sgd", "momentum", "adam"))
    momentum: float = option(0.9, "momentum of optimizer=momentum", low=0, below=1)
    weight_decay: float = option(
        0.0, "strength λ of the local L2 penalty on the weights, with the gradient λ w", low=0
    )
    weight_decay_on: str = option(
        "all",
        "weights that weight-decay acts on: all, or kernels only (not biases and scales, as Keras)",
        among=("all", "kernels"),
    )
    augment: bool = option(
        False, "shift training images by up to 4 pixels and mirror them, anew in every epoch"
    )

    def in_messages(self) -> dict[str, Any]:
        """Return the settings of the run's training messages, without defaults."""
        own = {key_of(item.name): item for item in fields(TrainingOptions)}
        values = {key: getattr(self, item.name) for key, item in own.items()}
        # Users' apps that are written for Flower's strategies expect the first three.
        stated = tuple(own)[:3]
        return {k: v for k, v in values.items() if k in stated or v != own[k].default}


@dataclass(frozen=True)
class TrainingSettings(TrainingOptions):
    """Settings of one local training; a ValueError refuses those out of range.

    Settings without a key of the run belong to methods. Keras' ``l2(s)`` is s ‖w‖², which
    corresponds to a `weight_decay` λ of 2 s.
    """

    lr: float = option(0.01, "learning rate η of the local optimiser", above=0)
    proximal_mu: float = option(
        0.0, "strength μ of FedProx's term μ/2 ‖w - w₀‖², with w₀ the received weights", low=0
    )
    dropout: float = option(0.0, "dropout probability of inputs of linear layers", low=0, below=1)

    def __post_init__(self) -> None:
        for item in fields(self):
            _converted(getattr(self, item.name), item)

    @classmethod
    def of(cls, settings: Mapping[str, Any], run: TrainingOptions, lr_scale: float = 1.0) -> Self:
        """Return the settings of a message, completed by those of the run.

        Parameters
        ----------
        settings : Mapping[str, Value]
            Settings of the message.
        run : TrainingOptions
            Options of the run.
        lr_scale : float
            Factor on the learning rate.
        """
        values: dict[str, Any] = {
            item.name: getattr(run, item.name, item.default) for item in fields(cls)
        }
        keys = {item.name: key_of(item.name) for item in fields(cls)}
        stated = {name: settings[key] for name, key in keys.items() if key in settings}
        own = (tuple(values.items()), tuple(stated.items()))
        kinds = tuple(type(value) for value in (*values.values(), *stated.values()))
        # Cached, as most tasks have the same settings. Lists are invalid, and not hashable.
        make = _made if list not in kinds else _made.__wrapped__
        # mypy does not recognise the values as hashable.
        kind: Any = cls
        made: Self = make(kind, *own, kinds, lr_scale)
        return made


_Values = tuple[tuple[str, Any], ...]


@lru_cache(maxsize=256)
def _made(cls: Any, run: _Values, stated: _Values, kinds: tuple[type, ...], lr_scale: float) -> Any:
    """Return settings of a run's values and those of a message, which take precedence."""
    items = {item.name: item for item in fields(cls)}
    values = dict(run) | {name: _converted(value, items[name]) for name, value in stated}
    return cls(**{**values, "lr": values["lr"] * lr_scale})


def _converted(value: Any, item: Field[Any]) -> Any:
    try:
        return convert(key_of(item.name), value, item)
    except UserError as error:
        raise ValueError(str(error)) from None
