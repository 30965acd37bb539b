"""User input: keys and values of a run, TOML files, lists of devices."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from raceme.core.config import RunConfig, all_keys, assignments, read_toml
from raceme.core.errors import UserError
from raceme.core.registry import DRIFTS, PARTITIONERS, STRATEGIES
from raceme.runs.experiment import build_strategy, resolve
from raceme.simulation.devices import fleet

from .case import refused_in_a_line

_EXAMPLES = 30
_PLAIN: Any = {"phases": [Phase.generate], "report_multiple_bugs": False}
_LIBERAL = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

_names = st.sampled_from([*STRATEGIES, *PARTITIONERS, *DRIFTS, "digits", "synthetic", "auto"])
_values = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.booleans(),
    st.text(max_size=30),
    _names,
    st.sampled_from(["1e12", "nan", "-inf", "0x10", "1_000", "20s", "slow30x10", "", "trace:"]),
    st.lists(st.integers(), max_size=3),
    st.none(),
)
_keys = st.one_of(st.sampled_from(sorted(all_keys())), st.text(max_size=12))
_FEW = {"dataset": "digits", "clients": 4, "workers": "0"}


def attack(subject: str, rng: random.Random, folder: Path) -> None:
    """Try many values; each is accepted, or refused in one line."""
    number = rng.randrange(2**32)

    @seed(number)
    @settings(
        max_examples=_EXAMPLES,
        database=None,
        suppress_health_check=_LIBERAL,
        **_PLAIN,
    )
    @given(_SUBJECTS[subject])
    def check(example: Any) -> None:
        with refused_in_a_line():
            _PLAYS[subject](example, folder)

    check()


def _keys_of_a_run(mapping: dict[str, Any], folder: Path) -> None:
    """Resolve a configuration, and make its method."""
    config = resolve(RunConfig.from_mapping({**_FEW, **mapping, "download": False}))
    build_strategy(config).check(config.num_clients)
    RunConfig.from_mapping(config.to_mapping())


def _toml(text: bytes, folder: Path) -> None:
    path = folder / "config.toml"
    path.write_bytes(text)
    with contextlib.suppress(UserError):
        RunConfig.from_mapping(read_toml(path))
    read_toml(path)


def _set(text: str, folder: Path) -> None:
    for key, value in assignments(text):
        RunConfig.from_mapping({key: value})


def _devices(text: str, folder: Path) -> None:
    fleet(text, 4, 0)


_PLAYS = {
    **{"keys": _keys_of_a_run, "toml": _toml, "set": _set, "devices": _devices},
    **{"nested-toml": _toml, "nested-set": _set},
}
_deep = st.integers(1, 3000).map(lambda depth: b"a = " + b"[" * depth + b"]" * depth)
_SUBJECTS: dict[str, st.SearchStrategy[Any]] = {
    "keys": st.dictionaries(_keys, _values, max_size=4).filter(
        lambda keys: (
            not {"out", "resume", "data-root", "workers", "config"} & keys.keys()
            and keys.get("dataset", "digits") in ("digits", "synthetic")
            and not isinstance(keys.get("clients"), int)
        )
    ),
    "toml": st.one_of(
        st.binary(max_size=80),
        st.text(max_size=80).map(lambda text: text.encode("utf-8", "replace")),
        st.tuples(_keys, st.text(max_size=20)).map(
            lambda pair: f'"{pair[0]}" = {pair[1]}'.encode("utf-8", "replace")
        ),
    ),
    "set": st.one_of(
        st.text(max_size=60),
        st.tuples(_keys, st.text(max_size=20)).map("=".join),
    ),
    "devices": st.one_of(
        st.text(max_size=20),
        st.tuples(st.integers(), st.integers()).map(lambda p: f"slow{p[0]}x{p[1]}"),
        st.sampled_from(["trace:/", "trace:\0", "/dev/null", "x" * 500, "fleet.toml", "/"]),
    ),
}

_SUBJECTS["nested-toml"] = _deep
_SUBJECTS["nested-set"] = _deep.map(lambda text: "seed=" + text.decode()[4:])
SUBJECTS = ("keys", "toml", "set", "devices")
NESTED = ("nested-toml", "nested-set")
