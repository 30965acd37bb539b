"""The keys of a run: text, TOML and Flower's run config in, one checked configuration out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raceme.config import (
    AUTO,
    RunConfig,
    Value,
    all_keys,
    key,
    parameters_from,
    parse_assignment,
    read_toml,
    write_toml,
)
from raceme.errors import UserError
from raceme.strategies import STRATEGIES, FedAsyncParameters


def config_of(**keys: Value) -> RunConfig:
    return RunConfig.from_mapping({name.replace("_", "-"): value for name, value in keys.items()})


# Text in, values out.


def test_nothing_given_is_all_defaults() -> None:
    assert RunConfig.from_mapping({}) == RunConfig()


def test_values_take_the_type_of_their_key() -> None:
    config = RunConfig.from_mapping(
        {"clients": "12", "lr": "1e-2", "download": "True", "max-time": 30, "out": 2024}
    )
    assert (config.clients, config.lr, config.download) == (12, 0.01, True)
    assert (config.max_time, config.out) == (30.0, "2024")
    assert config_of(clients=5.0).clients == 5
    assert config_of(clients="1e3").clients == 1000


def test_large_whole_numbers_keep_all_their_digits() -> None:
    for seed in (2**53 + 1, 2**63 - 1, 10**30 + 7):
        assert config_of(seed=seed).seed == seed
        assert config_of(seed=str(seed)).seed == seed


def test_auto_is_none_only_where_a_key_allows_it() -> None:
    assert config_of(lr=AUTO).lr is None
    assert config_of(stop_at_target=AUTO).stop_at_target is None
    with pytest.raises(UserError, match="clients must be a whole number, got 'auto'"):
        config_of(clients=AUTO)


def test_options_of_strategies_are_dotted_keys() -> None:
    config = RunConfig.from_mapping({"casa.gamma": "0.2", "fedbuff.k": 4, "strategy": "fedbuff"})
    assert config.options == {"casa": {"gamma": 0.2}, "fedbuff": {"k": 4}}
    assert config.parameters() == {"k": 4, "server-lr": 1.0}
    chosen = STRATEGIES["fedbuff"].parameters_type
    assert parameters_from(chosen, config.parameters()) == chosen(k=4)


@dataclass(frozen=True)
class Options:
    """A method's, with one that is left to it."""

    size: int | None = key(None, "how large", low=1)


def test_an_option_left_to_the_method_is_none_for_it() -> None:
    assert parameters_from(Options, {"size": AUTO}) == Options(None)
    assert parameters_from(Options, {"size": "3"}) == Options(3)


def test_the_key_set_holds_others_and_wins() -> None:
    config = RunConfig.from_mapping({"seed": 1, "set": "casa.gamma=0.2 seed=5 out='a b'"})
    assert (config.seed, config.out) == (5, "a b")
    assert config.options == {"casa": {"gamma": 0.2}}
    with pytest.raises(UserError, match="set takes 'key=value key=value'"):
        RunConfig.from_mapping({"set": "out='a"})


# There and back.


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_a_written_file_gives_the_same_run(strategy: str, tmp_path: Path) -> None:
    config = config_of(strategy=strategy, seed=3, lr=0.05, data_root="a b/ü", target_accuracy=0.9)
    write_toml(config, tmp_path / "config.toml")
    again = RunConfig.from_mapping(read_toml(tmp_path / "config.toml"))
    assert again.to_mapping() == config.to_mapping()
    assert again.with_values(options={}) == config.with_values(options={})
    assert again.parameters() == config.parameters()


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "clients": st.integers(1, 10**6),
            "seed": st.integers(0, 2**63 - 1),
            "lr": st.floats(1e-9, 10) | st.just(AUTO),
            "max-time": st.floats(0, 1e12),
            "test-fraction": st.floats(0.01, 0.99),
            "validation-fraction": st.floats(0.0, 0.99),
            "target-accuracy": st.floats(0.01, 1.0) | st.just(AUTO),
            "stop-at-target": st.booleans() | st.just(AUTO),
            "download": st.booleans(),
            "sizes": st.sampled_from(["equal", "power-law"]),
            "data-root": TEXTS,
            "strategy": st.sampled_from(sorted(STRATEGIES)),
            "casa.gamma": st.floats(0.01, 1.0),
            "fedasync.decay": st.sampled_from(["constant", "hinge", "polynomial"]),
            "fedprox.proximal-mu": st.floats(0.0, 5.0),
        },
    )
)
def test_mapping_and_toml_lose_nothing(
    tmp_path_factory: pytest.TempPathFactory, mapping: dict[str, Value]
) -> None:
    config = RunConfig.from_mapping(mapping)
    flat = config.to_mapping()
    assert RunConfig.from_mapping(flat).to_mapping() == flat
    path = tmp_path_factory.getbasetemp() / "round-trip.toml"
    write_toml(config, path)
    assert RunConfig.from_mapping(read_toml(path)).to_mapping() == flat
    for name, value in mapping.items():
        if "." not in name or name.startswith(f"{config.strategy}."):
            assert flat[name] == value


def test_tables_and_quoted_dotted_keys_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("seed = 4\n[casa]\ngamma = 0.3\n", encoding="utf-8")
    assert read_toml(path) == {"seed": 4, "casa.gamma": 0.3}
    path.write_text('"casa.gamma" = 0.3\nseed = 4\n', encoding="utf-8")
    assert read_toml(path) == {"seed": 4, "casa.gamma": 0.3}


def test_every_key_is_listed_with_default_and_description() -> None:
    listed = all_keys()
    assert listed["clients"][0] == 40
    assert listed["lr"][0] == AUTO
    assert listed["fedasync.alpha"][0] == 0.3
    assert all(text for _, text in listed.values())
    assert set(RunConfig().to_mapping()) <= set(listed)
    # Every default passes the checks that a person's value has to pass.
    RunConfig.from_mapping({name: default for name, (default, _) in listed.items()})


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("clients=12", ("clients", 12)),
        (" lr = 0.5 ", ("lr", 0.5)),
        ("download=true", ("download", True)),
        ("strategy=fedavg", ("strategy", "fedavg")),
        ('strategy="fedavg"', ("strategy", "fedavg")),
        ("casa.gamma=0.2", ("casa.gamma", 0.2)),
        ("groups=0.5,0.5", ("groups", "0.5,0.5")),
        ("data-root=/a=b", ("data-root", "/a=b")),
        ("out=", ("out", "")),
    ],
)
def test_assignments(text: str, parsed: tuple[str, Value]) -> None:
    assert parse_assignment(text) == parsed


# Mistakes.


@pytest.mark.parametrize("text", ["clients", "=3", "  = 3"])
def test_an_assignment_needs_a_key_and_an_equals_sign(text: str) -> None:
    with pytest.raises(UserError, match="--set takes key=value"):
        parse_assignment(text)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("client", 3, "Unknown key 'client'. Did you mean 'clients'"),
        ("max_updates", 3, "Did you mean 'max-updates'"),
        ("casa.gama", 0.1, "Did you mean 'casa.gamma'"),
        ("cassa.gamma", 0.1, "Did you mean 'casa.gamma'"),
        ("fedasync.gamma", 0.1, "Unknown key 'fedasync.gamma'"),
        ("casa.", 0.1, "Unknown key 'casa.'"),
        ("clients", 2.5, "clients must be a whole number, got 2.5"),
        ("clients", True, "clients must be a whole number, got True"),
        ("clients", "many", "clients must be a whole number, got 'many'"),
        ("clients", [1, 2], "clients must be a whole number"),
        ("clients", float("inf"), "clients must be a whole number"),
        ("clients", float("nan"), "clients must be a whole number"),
        ("clients", "1e400", "clients must be a whole number"),
        ("clients", 0, "clients must be at least 1, got 0"),
        ("lr", 0, "lr must be greater than 0, got 0"),
        ("lr", -0.1, "lr must be greater than 0"),
        ("lr", "nan", "lr must be a number, got 'nan'"),
        ("lr", float("inf"), "lr must be a number"),
        ("lr", 10**400, "lr must be a number"),
        ("lr", {"a": 1}, "lr must be a number"),
        ("lr", [0.1], "lr must be a number"),
        ("download", "yes", "download must be true or false, got 'yes'"),
        ("download", 1, "download must be true or false, got 1"),
        ("out", True, "out must be text, got True"),
        ("out", ["a"], "out must be text"),
        ("sizes", "powerlaw", "Did you mean 'power-law'"),
        ("test-fraction", 1.0, "test-fraction must be below 1"),
        ("validation-fraction", 1.0, "validation-fraction must be below 1"),
        ("target-accuracy", 1.01, "target-accuracy must be at most 1"),
        ("seed", -1, "seed must be at least 0"),
        ("fedbuff.k", 0, "fedbuff.k must be at least 1"),
        ("fedavg.fraction", 1.5, "fedavg.fraction must be at most 1"),
        ("fedavg.fraction", 0, "fedavg.fraction must be greater than 0"),
        ("fedasync.decay", "hing", "Did you mean 'hinge'"),
        ("casa.gamma", "x", "casa.gamma must be a number"),
    ],
)
def test_mistakes_are_explained(name: str, value: Value, message: str) -> None:
    with pytest.raises(UserError, match=message):
        RunConfig.from_mapping({name: value})


def test_an_accuracy_of_one_may_be_the_target() -> None:
    assert config_of(target_accuracy=1.0).target_accuracy == 1.0


def test_ranges_hold_for_copies_too() -> None:
    with pytest.raises(UserError, match="clients must be at least 1"):
        RunConfig().with_values(clients=0)


def test_an_unknown_strategy_has_no_parameters() -> None:
    with pytest.raises(UserError, match=r"Unknown strategy 'cassa'. Did you mean 'casa'"):
        config_of(strategy="cassa").parameters()


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"seed = ", "not valid TOML"), (b"\xff\xfe", "not valid TOML"), (None, "Cannot read")],
)
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "a.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_toml(path)


def test_a_table_in_a_table_is_no_key(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[casa.gamma]\nx = 1\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"casa.gamma must be a number"):
        RunConfig.from_mapping(read_toml(path))


def test_parameters_are_plain_frozen_dataclasses() -> None:
    assert parameters_from(FedAsyncParameters, {"alpha": "0.5", "b": 2}) == FedAsyncParameters(
        alpha=0.5, b=2.0
    )


@pytest.mark.parametrize("name", ["fedasync.alpha", "ifca-async.alpha", "casa-d.constant-alpha"])
def test_a_share_of_a_mixture_is_at_most_one(name: str) -> None:
    """Beyond 1 the old model would count negatively; FedAsync's paper has α in (0, 1)."""
    RunConfig.from_mapping({name: 1})
    with pytest.raises(UserError, match=f"^{name} must be at most 1, got 1.5"):
        RunConfig.from_mapping({name: 1.5})
