"""The keys of a run: text, TOML and Flower's run config are read into one checked configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from raceme.cli.keys import KeyCommand, as_assignments, with_keys
from raceme.core.config import RunConfig, all_keys, parse_assignment, read_toml, write_toml
from raceme.core.errors import UserError
from raceme.core.options import AUTO, Value, _warn_of_former_name, option
from raceme.core.registry import DATASETS
from raceme.datasets.npz import NpzOptions
from raceme.datasets.partition import NoiseGroupOptions
from raceme.datasets.source import Digits
from raceme.runs.experiment import build_strategy, resolve
from raceme.strategies import (
    STRATEGIES,
    FedAsyncParameters,
    FedAvg,
    FedBuffParameters,
)


def config_of(**keys: Value) -> RunConfig:
    return RunConfig.from_mapping({name.replace("_", "-"): value for name, value in keys.items()})


def chosen_for(name: str) -> dict[str, Value]:
    """Return the strategy that has to be chosen for a key, if it depends on one."""
    strategy = name.partition(".")[0]
    return {"strategy": strategy} if strategy in STRATEGIES else {}


# Text is parsed into values.


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
    for seed in (2**53 + 1, 2**63 - 1):
        assert config_of(seed=seed).seed == seed
        assert config_of(seed=str(seed)).seed == seed


def test_auto_is_none_only_where_a_key_allows_it() -> None:
    assert config_of(lr=AUTO).lr is None
    assert config_of(stop_at_target=AUTO).stop_at_target is None
    with pytest.raises(UserError, match="batch-size must be a whole number, got 'auto'"):
        config_of(batch_size=AUTO)


def test_the_length_of_a_run_that_schedules_depend_on() -> None:
    assert config_of().planned_updates == 500
    assert config_of(max_updates=30, max_rounds=4).planned_updates == 30
    rounds = {"max-rounds": 4, "clients": 25}
    # A round-based method has a share of the clients in each round: int(0.3 · 25) = 7.
    fedavg = RunConfig.from_mapping({**rounds, "strategy": "fedavg", "fedavg.fraction": 0.3})
    assert fedavg.planned_updates == 28
    # With a method that has no fraction, all clients count.
    assert RunConfig.from_mapping({**rounds, "strategy": "casa"}).planned_updates == 100


def test_a_limit_is_filled_in_unless_rounds_are_the_limit() -> None:
    assert resolve(config_of(clients=8)).max_updates == 500
    rounds = resolve(config_of(clients=8, max_rounds=3, strategy="fedavg"))
    assert (rounds.max_updates, rounds.max_rounds) == (None, 3)
    assert RunConfig.from_mapping(rounds.to_mapping()) == rounds
    build_strategy(rounds)
    with pytest.raises(UserError, match="max-rounds counts rounds or windows, and fedbuff has"):
        build_strategy(resolve(config_of(clients=8, max_rounds=3, strategy="fedbuff")))


def test_only_images_are_augmented() -> None:
    build_strategy(resolve(config_of(augment=True)))
    with pytest.raises(UserError, match="augment shifts images by 4 pixels, and synthetic has"):
        build_strategy(resolve(config_of(augment=True, dataset="synthetic")))


def test_options_of_strategies_are_dotted_keys() -> None:
    config = RunConfig.from_mapping({"fedbuff.k": "4", "strategy": "fedbuff"})
    assert config.options == {"fedbuff.k": 4}
    assert config.parameters() == FedBuffParameters(k=4, server_lr=1.0)
    assert config.parameters() is config.parameters()


def test_a_renamed_key_is_still_read_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_former_name.cache_clear()
    former = {"strategy": "fedavg", "fedavg.picking": "in-turn"}
    present = {"strategy": "fedavg", "fedavg.sampling": "in-turn"}
    for _ in range(2):
        assert RunConfig.from_mapping(former) == RunConfig.from_mapping(present)
    assert [record.getMessage() for record in caplog.records] == [
        "fedavg.picking is called fedavg.sampling now; the next release drops the former name."
    ]
    # The former name of another method's key may be given with its default, like the present name.
    assert RunConfig.from_mapping({"strategy": "casa", "fedavg.picking": "random"}).options == {}
    with pytest.raises(
        UserError, match=r"fedavg\.picking is called fedavg\.sampling now: give one"
    ):
        RunConfig.from_mapping(former | present)


def test_a_renamed_argument_of_a_method_is_still_read() -> None:
    assert FedAvg(picking="in-turn").parameters.sampling == "in-turn"


def test_the_key_set_holds_others_and_wins() -> None:
    config = RunConfig.from_mapping({"seed": 1, "set": "casa.gamma=0.2 seed=5 out='a b'"})
    assert (config.seed, config.out) == (5, "a b")
    assert config.options == {"casa.gamma": 0.2}
    with pytest.raises(UserError, match="set takes 'key=value key=value'"):
        RunConfig.from_mapping({"set": "out='a"})


# Round trips.


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_a_written_file_gives_the_same_run(strategy: str, tmp_path: Path) -> None:
    config = config_of(strategy=strategy, seed=3, lr=0.05, data_root="a b/ü", target_accuracy=0.9)
    write_toml(config.to_mapping(), tmp_path / "config.toml")
    again = RunConfig.from_mapping(read_toml(tmp_path / "config.toml"))
    assert again == config
    assert again.parameters() == config.parameters()


TEXTS = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cs",), exclude_characters="\0"), max_size=12
)
"""Alphabet of paths, which cannot contain NUL."""


@settings(max_examples=60)
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
        },
    ),
    st.floats(0.01, 1.0),
)
def test_mapping_and_toml_lose_nothing(
    tmp_path_factory: pytest.TempPathFactory, mapping: dict[str, Value], gamma: float
) -> None:
    if mapping.get("strategy", "casa") == "casa":
        mapping["casa.gamma"] = gamma
    config = RunConfig.from_mapping(mapping)
    flat = config.to_mapping()
    assert RunConfig.from_mapping(flat).to_mapping() == flat
    path = tmp_path_factory.getbasetemp() / "round-trip.toml"
    write_toml(config.to_mapping(), path)
    assert RunConfig.from_mapping(read_toml(path)) == config
    for name, value in mapping.items():
        assert flat[name] == value


def test_tables_and_quoted_dotted_keys_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("seed = 4\n[casa]\ngamma = 0.3\n", encoding="utf-8")
    assert read_toml(path) == {"seed": 4, "casa.gamma": 0.3}
    path.write_text('"casa.gamma" = 0.3\nseed = 4\n', encoding="utf-8")
    assert read_toml(path) == {"seed": 4, "casa.gamma": 0.3}


def test_every_key_is_listed_with_default_and_description() -> None:
    listed = all_keys()
    assert listed["clients"].default == AUTO
    assert listed["lr"].default == AUTO
    assert listed["fedasync.alpha"].default == 0.3
    assert all(key.help and key.type for key in listed.values())
    assert set(RunConfig().to_mapping()) <= set(listed)
    # Defaults pass the same checks as a user's values.
    assert (
        RunConfig.from_mapping({name: key.default for name, key in listed.items()}) == RunConfig()
    )


def test_keys_show_type_unit_and_readers() -> None:
    listed = all_keys()
    shown = {name: (key.type, key.unit) for name, key in listed.items()}
    assert shown["max-time"] == ("NUMBER", "s")
    assert shown["checkpoint-seconds"] == ("NUMBER|auto", "s")
    assert shown["eval-every"] == ("INTEGER|auto", "")
    assert shown["image-size"] == ("INTEGER", "px")
    assert shown["sizes"] == ("equal|power-law|log-normal", "")
    assert shown["download"] == ("true|false", "")
    assert listed["groups"].readers == {
        "partition": ("label-groups", "rotation-groups", "noise-groups")
    }
    assert listed["seed"].readers == {}


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


# Errors.


@pytest.mark.parametrize("text", ["clients", "=3", "  = 3"])
def test_an_assignment_needs_a_key_and_an_equals_sign(text: str) -> None:
    with pytest.raises(UserError, match="--set takes key=value"):
        parse_assignment(text)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("client", 3, "Unknown key 'client'. Did you mean 'clients'\\? `raceme list --keys` lists"),
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
        ("seed", -1, "seed must be at least 0"),
        ("fedbuff.k", 0, "fedbuff.k must be at least 1"),
        ("fedavg.fraction", 1.5, "fedavg.fraction must be at most 1"),
        ("fedavg.fraction", 0, "fedavg.fraction must be greater than 0"),
        ("fedasync.decay", "hing", "Did you mean 'hinge'"),
        ("casa.gamma", "x", "casa.gamma must be a number"),
    ],
)
def test_error_messages_explain_mistakes(name: str, value: Value, message: str) -> None:
    with pytest.raises(UserError, match=message):
        RunConfig.from_mapping({**chosen_for(name), name: value})


# Options of strategies, datasets and partitions.


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"dirichlet-alpha": 0.5, "partition": "iid"},
            "dirichlet-alpha is read by partition label-groups, dirichlet and dirichlet-by-class; "
            "this run has partition iid.",
        ),
        (
            {"casa.gamma": 0.2, "strategy": "fedasync"},
            "casa.gamma is read by strategy casa; this run has strategy fedasync.",
        ),
        (
            {"set": "image-size=32"},
            "image-size is read by dataset image-folder; this run has dataset digits.",
        ),
    ],
)
def test_a_key_that_nobody_reads_is_an_error(keys: dict[str, Value], message: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        RunConfig.from_mapping(keys)


def test_a_key_that_nobody_reads_may_have_its_default() -> None:
    """Flower's run config always holds every key that pyproject.toml lists."""
    keys = {"partition": "iid", "dirichlet-alpha": "1.0", "casa.gamma": 0.15, "strategy": "fedavg"}
    assert RunConfig.from_mapping(keys) == RunConfig(partition="iid", strategy="fedavg")


def test_a_device_leaves_out_what_it_does_not_read() -> None:
    keys = {"partition": "iid", "dirichlet-alpha": 0.5, "casa.gamma": 1, "sizes": "power-law"}
    assert RunConfig.from_mapping(keys, lenient=True).options == {"sizes": "power-law"}


def test_what_is_not_read_is_not_written() -> None:
    written = RunConfig(partition="iid", strategy="fedbuff").to_mapping()
    assert {"sizes", "fedbuff.k"} <= set(written)
    assert not {"groups", "dirichlet-alpha", "casa.gamma", "data-file"} & set(written)


def test_options_are_read_typed_and_with_a_range() -> None:
    config = config_of(partition="noise-groups", noise_std="0.5", groups="0.5,0.5")
    options = config.read(NoiseGroupOptions)
    assert options == NoiseGroupOptions(noise_std=0.5, groups="0.5,0.5", sizes="equal")
    with pytest.raises(UserError, match="noise-std must be at least 0, got -1"):
        RunConfig(options={"noise-std": -1.0}).read(NoiseGroupOptions)


def test_copies_take_options_by_attribute_too() -> None:
    config = RunConfig(partition="iid").with_values(partition="dirichlet", dirichlet_alpha=0.5)
    assert config == config_of(partition="dirichlet", dirichlet_alpha=0.5)
    with pytest.raises(UserError, match="this run has partition iid"):
        config.with_values(partition="iid").check_options()
    with pytest.raises(UserError, match="Unknown key 'alpha'"):
        config.with_values(alpha=0.5)


def test_the_part_that_decides_the_data_is_equal_whatever_else_differs() -> None:
    config = config_of(dataset="image-folder", image_size=8, sizes="power-law", lr=0.5)
    data = config.narrowed("dataset", "clients")
    assert data == RunConfig(dataset="image-folder", options={"image-size": 8})
    assert config.narrowed("partition").options == {"sizes": "power-law"}
    assert hash(data) == hash(config.with_values(seed=3).narrowed("dataset", "clients"))


def test_paths_become_absolute_and_other_text_stays() -> None:
    keys = {"dataset": "npz", "data-file": "{client}.npz", "data-root": "~", "workers": "0"}
    config = RunConfig.from_mapping(keys).with_absolute_paths()
    assert config.read(NpzOptions).data_file == str(Path.cwd() / "{client}.npz")
    assert (config.data_root, config.resume, config.workers) == (str(Path.home()), "", "0")


@dataclass(frozen=True)
class MoonOptions:
    phase: float | None = option(None, "phase of the moon", unit="degrees", low=0, below=360)


class Moons(Digits):
    """A user's dataset with an option."""

    options_type = MoonOptions


@pytest.fixture
def moons(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {**DATASETS._targets, "moons": f"{__name__}:Moons"}
    monkeypatch.setattr(DATASETS, "_targets", targets)


@pytest.mark.usefixtures("moons")
def test_an_option_declared_in_one_place_works_from_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "moon.toml"
    path.write_text('dataset = "moons"\nphase = 90\n', encoding="utf-8")
    seen: list[RunConfig] = []

    def command(keys: Mapping[str, Value]) -> None:
        seen.append(RunConfig.from_mapping(keys))

    app = typer.Typer()
    app.command("run", cls=KeyCommand)(with_keys(command))
    chosen = ["--dataset", "moons"]
    for typed in ([*chosen, "--phase", "90"], [*chosen, "--set", "phase=90"], ["--config", path]):
        app([str(word) for word in typed], standalone_mode=False)
    seen.append(RunConfig.from_mapping({"dataset": "moons", "set": "phase=90"}))
    assert [config.read(MoonOptions) for config in seen] == [MoonOptions(90.0)] * 4
    assert seen[0].to_mapping()["phase"] == 90.0
    assert all_keys()["phase"][:4] == (AUTO, "phase of the moon", "NUMBER|auto", "degrees")
    with pytest.raises(UserError, match="phase must be below 360, got 360"):
        RunConfig.from_mapping({"dataset": "moons", "phase": 360})
    with pytest.raises(UserError, match="phase is read by dataset moons"):
        RunConfig.from_mapping({"phase": 90})


@pytest.mark.usefixtures("moons")
def test_a_dataset_that_has_clients_has_no_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Moons, "has_clients", True, raising=False)
    own = config_of(dataset="moons")
    own.check_options()
    assert not {"partition", "groups", "sizes"} & set(own.to_mapping())
    assert RunConfig.from_mapping(own.to_mapping()) == own
    with pytest.raises(UserError, match=r"this run has no partition \(dataset moons\)\.$"):
        config_of(dataset="moons", groups="0.5,0.5")
    with pytest.raises(UserError, match="partition is not read with dataset moons: leave it out"):
        config_of(dataset="moons", partition="iid").check_options()


@dataclass(frozen=True)
class OtherSizes:
    sizes: int = option(3, "something else")


@pytest.mark.usefixtures("moons")
def test_one_key_has_one_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Moons, "options_type", OtherSizes)
    with pytest.raises(
        UserError, match=r"^P.* '.*' declares sizes differently from others: give .*"
    ):
        all_keys()


@dataclass(frozen=True)
class NoDefault:
    phase: int


@dataclass(frozen=True)
class Several:
    phases: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Contradictory:
    phase: int = option(3, "phase of the moon")

    def __post_init__(self) -> None:
        raise ValueError("phase and tide contradict each other")


@pytest.mark.usefixtures("moons")
@pytest.mark.parametrize(
    ("options_type", "said"),
    [
        (NoDefault, r"^Options need defaults: .*test_config.NoDefault has none for phase\.$"),
        (Several, r"^Options are texts.*test_config.Several has \(1, 2\) as the default of phases"),
        ("text", r"^Options must be a dataclass, got 'text'\.$"),
        (
            Contradictory,
            r"Contradictory cannot be built from these options: ValueError: phase and tide",
        ),
    ],
)
def test_options_that_cannot_be_read_are_one_line(
    options_type: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Moons, "options_type", options_type)
    config = config_of(dataset="moons")

    def read() -> None:
        config.to_mapping()
        config.read(Moons.options_type)

    with pytest.raises(UserError, match=said):
        read()


@pytest.mark.parametrize(
    ("typed", "turned"),
    [
        (["--groups", "0.5,0.5", "--out", "a"], ["--set", "groups=0.5,0.5", "--out", "a"]),
        (["--groups=0.5,0.5", "casa"], ["--set", "groups=0.5,0.5", "casa"]),
        (["--casa.gamma", "-0.2"], ["--set", "casa.gamma=-0.2"]),
        (["--al"], ["--al"]),
        (["--al", "--out", "a"], ["--al", "--out", "a"]),
        (["--", "--groups", "a"], ["--", "--groups", "a"]),
        (
            ["--vectorised", "casa", "--augment"],
            ["--vectorised=true", "casa", "--set", "augment=true"],
        ),
        (
            ["--own-model", "auto", "--vectorised", "false"],
            ["--set", "own-model=auto", "--vectorised=false"],
        ),
        (["--no-vectorised", "--vectorised=true"], ["--vectorised=false", "--vectorised=true"]),
        (["--apfl.adaptive"], ["--set", "apfl.adaptive=true"]),
        (["--apfl.adaptive", "--out", "a"], ["--set", "apfl.adaptive=true", "--out", "a"]),
        (["--attack-probes"], ["--set", "attack-probes=true"]),
        (["--attack-probes", "--out", "a"], ["--set", "attack-probes=true", "--out", "a"]),
        (["--attack-probes", "false"], ["--set", "attack-probes=false"]),
        (["--apfl.adaptive", "false", "a"], ["--set", "apfl.adaptive=false", "a"]),
        (["--where", "", "--out", "a"], ["--set", "where=", "--out", "a"]),
        (["--where=", "casa"], ["--set", "where=", "casa"]),
        (["--labels", ""], ["--set", "labels="]),
        (["--casa.gamma", ""], ["--set", "casa.gamma="]),
        (["--vectorised", "", "casa"], ["--vectorised=", "casa"]),
        (["--label", "", "--lr", "-1"], ["--set", "label=", "--set", "lr=-1"]),
    ],
)
def test_options_that_a_command_does_not_name_are_keys(typed: list[str], turned: list[str]) -> None:
    assert as_assignments(typed, ["--out", "--vectorised"]) == turned


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        (["--where"], "--where"),
        (["a", "--where", "--out", "b"], "--where"),
        (["--labels", "--augment"], "--labels"),
        (["--groups"], "--groups"),
        # The same for a key that is an option of the command itself.
        (["--out", "--vectorised"], "--out"),
        (["--out"], "--out"),
    ],
)
def test_a_key_without_a_value_is_told_to_need_one(typed: list[str], name: str) -> None:
    with pytest.raises(UserError, match=rf"^{name} needs a value.*`raceme list {name[2:]} --keys`"):
        as_assignments(typed, ["--out", "--vectorised"])


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
    [(b"seed = ", "not valid TOML"), (b"\xff\xfe", "no text in UTF-8"), (None, "Cannot read")],
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
    config = config_of(strategy="fedasync", set="fedasync.alpha=0.5 fedasync.b=2")
    assert config.parameters() == FedAsyncParameters(alpha=0.5, b=2.0)


@pytest.mark.parametrize("name", ["fedasync.alpha", "ifca-async.alpha", "casa-d.constant-alpha"])
def test_a_share_of_a_mixture_is_at_most_one(name: str) -> None:
    """Beyond 1 the old model would count negatively; FedAsync's paper has α in (0, 1)."""
    RunConfig.from_mapping({**chosen_for(name), name: 1})
    with pytest.raises(UserError, match=f"^{name} must be at most 1, got 1.5"):
        RunConfig.from_mapping({**chosen_for(name), name: 1.5})


def test_an_unknown_strategy_is_refused_at_construction() -> None:
    with pytest.raises(UserError, match=r"Unknown strategy 'cassa'\. Did you mean 'casa'\?"):
        RunConfig(strategy="cassa")
    # A device need not have the package of the server's method.
    config = RunConfig.from_mapping({"strategy": "of-the-server", "clients": 3}, lenient=True)
    assert config.clients == 3
