"""A device does only work that its owner has allowed: models, data, apps."""

from __future__ import annotations

import signal
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from bundles import announced, bundle, project
from flwr.app import ConfigRecord, Message, RecordDict
from nodes import write_device

import raceme
from raceme.cli import main
from raceme.core.errors import UserError
from raceme.fleet import device
from raceme.fleet.tasks import Apps, RefusedAppError, Trust
from raceme.flower.fleet_client import Endpoint
from raceme.flower.messages import INVALID_APP, identify_process
from raceme.training.clients import load

OWN = Trust(("raceme/raceme",))
KITCHEN = {"device-id": "kitchen", "data-file": "/data/kitchen.npz"}


def ask(config: str, trust: Trust = OWN, **node: str | bool) -> None:
    """Let a device check a run of Raceme's own app with a configuration, as TOML."""
    version = raceme.__version__
    data = bundle(pyproject=project("raceme", "raceme", version, config))
    run = announced(data, "raceme/raceme", version)
    own = {name.replace("_", "-"): value for name, value in node.items()}
    with closing(Apps(trust, {**KITCHEN, **own})) as apps:
        apps.of_run(7, lambda _: run, lambda _: data)


HOSTILE_MODELS = [
    "model = 'backup:x'",
    "model = 'os:system'",
    "model = ':'",
    "set = 'model=backup:x'",
    "model = 'mlp'\nset = 'seed=1 model=backup:x'",
    "set = 'model=\"backup:x\"'",
    "dataset = 'backup:x'",
    "set = 'dataset=backup:x groups=0.5,0.5'",
    "partition = 'backup:x'\ngroups = '0.5,0.5'",
    "drift = 'backup:x'",
    "protection = 'backup:x'",
    "attack = 'backup:x'",
    "features = 'backup:x'",
    "set = 'features=backup:x,backup:y'",
]


@pytest.mark.parametrize("config", HOSTILE_MODELS)
def test_a_server_cannot_have_a_module_imported_that_the_owner_never_named(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "backup.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RefusedAppError, match="is not trusted on this device") as refused:
        ask(config)
    assert refused.value.code == INVALID_APP
    assert not (tmp_path / "trace").exists()


def test_what_a_refusal_repeats_of_a_server_is_short_and_printable() -> None:
    with pytest.raises(RefusedAppError) as refused:
        ask('model = "a:\\u001b[31m\\n' + "x" * 100_000 + '"')
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300


def test_models_of_ours_and_those_that_the_owner_names_are_built() -> None:
    ask("model = 'mlp'")
    ask("model = 'auto'")
    trust = Trust(OWN.apps, ("backup:x", "other:build"))
    ask("model = 'backup:x'", trust)
    ask("set = 'model=other:build'", trust)
    ask("features = 'backup:x, other:build'", trust)
    with pytest.raises(RefusedAppError, match="features 'backup:y' is not trusted"):
        ask("features = 'backup:x,backup:y'", trust)
    with pytest.raises(RefusedAppError, match="'backup:y' is not trusted"):
        ask("model = 'backup:y'", trust)


def test_models_that_an_installed_package_declares_are_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "garden_models-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: garden-models\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[raceme.models]\nsoil = garden_models:soil\n")
    with pytest.raises(RefusedAppError, match="not trusted"):
        ask("model = 'garden_models:soil'")
    monkeypatch.syspath_prepend(str(tmp_path))
    ask("model = 'garden_models:soil'")
    with pytest.raises(RefusedAppError, match="not trusted"):
        ask("model = 'garden_models:other'")


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ("dataset = 'image-folder'\ndata-root = '/home/anna/photos'", "data-root"),
        ("set = 'dataset=image-folder data-root=/home/anna/photos'", "data-root"),
        ("dataset = 'mnist'\ndownload = true", "download"),
        ("set = 'download=true'", "download"),
    ],
)
def test_only_the_owner_decides_which_files_are_read(config: str, key: str) -> None:
    with pytest.raises(RefusedAppError, match=f"{key} is set by this device's owner"):
        ask(config)
    ask(config, data_root="/data", download=True)
    ask(config, Trust())


def test_the_servers_own_sample_file_is_no_obstacle_to_a_device_with_its_own() -> None:
    config = "dataset = 'npz'\ndata-file = '/state/sample.npz'\ndevice-keys = '/state/device-keys'"
    ask(config)
    data = bundle(pyproject=project("raceme", "raceme", raceme.__version__, config))
    run = announced(data, "raceme/raceme", raceme.__version__)
    with (
        closing(Apps(OWN, {"device-id": "kitchen"})) as apps,
        pytest.raises(RefusedAppError, match="data-file is set by"),
    ):
        apps.of_run(7, lambda _: run, lambda _: data)


@pytest.mark.parametrize(
    "config",
    [
        "lr = 'much'",
        "set = '\"'",
    ],
)
def test_a_configuration_that_cannot_be_read_is_an_error_reply_not_a_crash(config: str) -> None:
    with pytest.raises(RefusedAppError, match="the run's configuration cannot be read"):
        ask(config)


def test_a_device_that_trusts_everything_checks_nothing() -> None:
    for config in (*HOSTILE_MODELS, "data-root = '/home/anna'"):
        ask(config, Trust())


def test_the_configuration_of_another_app_is_its_own_business() -> None:
    data = bundle(pyproject=project(config="model = 'backup:x'\ndata-root = '/data'"))
    with closing(Apps(Trust(("tests/small",)))) as apps:
        loaded = apps.of_run(7, lambda _: announced(data), lambda _: data)
    assert loaded.config["model"] == "backup:x"


def test_the_owners_data_keys_win_over_the_runs(tmp_path: Path) -> None:
    own, other = tmp_path / "own.npz", tmp_path / "other.npz"
    write_device(own)
    write_device(other, classes=2)
    run = (("dataset", "npz"), ("data-file", str(other)), ("set", f"data-file={other}"))
    node = (("data-file", str(own)), ("device-id", "kitchen"))
    client = load(run, node, 0)
    assert client.num_classes == 3
    assert len(np.unique(client.train.y)) == 3


@pytest.mark.parametrize(
    ("apps", "models", "said"),
    [
        (("raceme",), (), "PUBLISHER/NAME"),
        ((), ("my_models:build",), "without --trusted-app"),
        (("raceme/raceme",), ("mlp",), "MODULE:FUNCTION"),
        (("raceme/raceme",), ("a:b\n",), "MODULE:FUNCTION"),
        (("raceme/raceme",), ("os:system; x",), "MODULE:FUNCTION"),
    ],
)
def test_invalid_trust_is_refused(
    apps: tuple[str, ...], models: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        Trust(apps, models)


def test_the_command_passes_the_trusted_publishers_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[device.DeviceOptions] = []
    monkeypatch.setattr(device, "run_device", told.append)
    options = ["--trusted-app", "raceme/raceme", "--trusted-model", "a.b:c"]
    command = ["raceme", "device", "--superlink", "a:1", "--insecure", *options]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    (seen,) = told
    assert seen.trust == Trust(("raceme/raceme",), ("a.b:c",))


def test_a_device_compares_a_run_with_what_its_owner_told_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = "dataset = 'mnist'\ndata-root = '/srv/data'"
    data = bundle(pyproject=project("raceme", "raceme", raceme.__version__, config))
    run = announced(data, "raceme/raceme", raceme.__version__)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(
        device,
        "_stay_online",
        lambda options, tasks, stop, hurry: tasks._apps.of_run(7, lambda _: run, lambda _: data),
    )
    endpoint = Endpoint("a:1", insecure=True)
    device.run_device(device.DeviceOptions(endpoint, node_config={"data-root": "/d"}, trust=OWN))
    with pytest.raises(RefusedAppError, match="data-root is set by"):
        device.run_device(device.DeviceOptions(endpoint, trust=OWN))


def work(**settings: str) -> Message:
    return Message(RecordDict({"config": ConfigRecord(dict(settings))}), 7, "train")


@pytest.mark.parametrize("key", ["kind", "completed-by"])
def test_client_work_that_a_server_names_is_imported_only_if_the_owner_named_it(key: str) -> None:
    identify_process()
    trust = Trust(OWN.apps, ("soil.client:train_soil",))
    trust.check_work(work(**{key: "train-elastic"}))
    trust.check_work(work(**{key: "soil.client:train_soil"}))
    for name in ("os:system", "raceme.fleet.serve:main", "soil.client:other"):
        with pytest.raises(RefusedAppError, match=f"client work '{name}' is not trusted"):
            trust.check_work(work(**{key: name}))
        Trust().check_work(work(**{key: name}))


def test_a_message_with_work_that_is_not_trusted_is_refused_before_anything_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "backup.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    identify_process()
    data = bundle(pyproject=project("raceme", "raceme", raceme.__version__))
    run = announced(data, "raceme/raceme", raceme.__version__)
    with closing(Apps(OWN, KITCHEN)) as apps:
        loaded = apps.of_run(7, lambda _: run, lambda _: data)
        with pytest.raises(RefusedAppError, match="'backup:x' is not trusted") as refused:
            apps.check_work(loaded, work(kind="backup:x"))
    assert refused.value.code == INVALID_APP
    assert not (tmp_path / "trace").exists()
