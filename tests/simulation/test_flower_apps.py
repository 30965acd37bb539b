"""What a person can get wrong about a Flower app, and what is said then."""

import sys
import threading
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import pytest
from flower_apps import CLIENT, write_app
from flwr.clientapp import ClientApp

from raceme.core.errors import UserError
from raceme.simulation.apps import AppEnding, FlowerApp, Settings, Simulated, read_app, simulate
from raceme.simulation.executor import load


def run(app: Path, **options: object) -> Simulated:
    settings = {"clients": 2, "workers": 0, "out": app / "out", **options}
    return simulate(Settings(app, **settings))  # type: ignore[arg-type]


def error(app: Path, **options: object) -> str:
    with pytest.raises(UserError) as raised:
        run(app, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_folder_that_is_no_app(tmp_path: Path) -> None:
    assert "does not exist" in error(tmp_path / "nothing")
    assert "no pyproject.toml" in error(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "a"\nversion = "1"')
    assert "Missing [tool.flwr.app] section" in error(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project")
    assert "is no Flower app" in error(tmp_path)


def test_run_config_is_overridden_as_by_flwr_run(tmp_path: Path) -> None:
    folder = write_app(tmp_path, "is_configured", "pass")
    app = read_app(folder, ["rounds=7", "text='b c'"])
    assert app.run_config == {"rounds": 7, "text": "b c"}
    (tmp_path / "more.toml").write_text("rounds = 9")
    assert read_app(folder, [str(tmp_path / "more.toml")]).run_config["rounds"] == 9
    assert read_app(folder).run_config == {"rounds": 2, "text": "a"}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["round=7"], "Unknown key in --run-config 'round'. Did you mean 'rounds'?"),
        (["rounds"], "key=value"),
        (["rounds=a b"], "invalid format"),
        (["rounds=1", "more.toml"], "TOML files cannot be passed alongside"),
        (["missing.toml"], "missing.toml"),
    ],
)
def test_run_config_that_cannot_be_read(tmp_path: Path, texts: list[str], message: str) -> None:
    folder = write_app(tmp_path, "is_misconfigured", "pass")
    with pytest.raises(UserError) as raised:
        read_app(folder, texts)
    assert message in str(raised.value)


def test_a_dependency_that_is_missing(tmp_path: Path) -> None:
    """It is named as the app's pyproject.toml asks for it, where that is clear."""
    folder = write_app(tmp_path, "needs_a_package", "pass", "import some_package\n" + CLIENT)
    message = error(folder)
    assert "'some_package'" in message
    assert "python3 -m pip install 'Some_Package[extra]>=2'" in message
    folder = write_app(tmp_path, "needs_another", "import not_listed.inner")
    message = error(folder)
    assert "'not_listed'" in message
    assert f"python3 -m pip install -e {folder}" in message


def test_a_module_that_the_app_itself_should_have(tmp_path: Path) -> None:
    folder = write_app(tmp_path, "lacks_a_module", "import lacks_a_module.task")
    message = error(folder)
    assert f"The app in {folder} imports 'lacks_a_module.task', which it does not" in message
    assert "pip install" not in message


def test_a_module_that_flower_no_longer_has(tmp_path: Path) -> None:
    message = error(write_app(tmp_path, "of_another_release", "import flwr.server.gone"))
    assert f"imports 'flwr.server.gone', which Flower {version('flwr')} does not have" in message
    assert "pip install" not in message


def test_dependencies_with_another_name_than_their_module() -> None:
    app = FlowerApp(Path("/app"), "app", "a:b", "c:d", {}, ("scikit-learn>=1", "scikit_image"))
    for module, distribution in (("sklearn.svm", "scikit-learn>=1"), ("skimage", "scikit_image")):
        missing = app.missing(ModuleNotFoundError(name=module))
        assert f"pip install '{distribution}'" in str(missing)


def test_an_app_with_a_torchvision_that_does_not_fit_torch(tmp_path: Path) -> None:
    """As torch's CPU wheel with the package index's torchvision: the import is tried again."""
    client = f"""
import sys

if "torchvision._meta_registrations" not in sys.modules:
    raise RuntimeError("operator torchvision::nms does not exist")
{CLIENT}
"""
    folder = write_app(tmp_path, "sees_pictures", "pass", client)
    with patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        assert isinstance(read_app(folder).load_client(), ClientApp)
        del sys.modules["torchvision._meta_registrations"], sys.modules["sees_pictures.client_app"]
        assert isinstance(load("sees_pictures.client_app:app"), ClientApp)


def test_parts_that_are_not_there(tmp_path: Path) -> None:
    folder = write_app(tmp_path, "has_no_parts", "pass")
    project = folder / "pyproject.toml"
    text = project.read_text()
    project.write_text(text.replace("has_no_parts.client_app:app", "has_no_parts.nowhere:app"))
    assert "no module 'has_no_parts.nowhere'" in error(folder)
    project.write_text(text.replace("has_no_parts.client_app:app", "has_no_parts.client_app:nope"))
    assert "Unable to load attribute nope" in error(folder)
    project.write_text(text.replace("client_app:app", "server_app:app"))
    assert "is not a ClientApp" in error(folder)


def test_an_app_that_cannot_be_imported(tmp_path: Path) -> None:
    folder = write_app(tmp_path, "has_a_typo", "pass", CLIENT + "\nanswr(1)\n")
    message = error(folder)
    assert "NameError: name 'answr' is not defined" in message
    assert "client_app.py:" in message
    folder = write_app(tmp_path, "has_bad_syntax", "if:")
    assert "server_app.py:20" in error(folder)


def test_flowers_older_interface_is_refused(tmp_path: Path) -> None:
    folder = write_app(tmp_path, "is_old", "pass")
    (folder / "is_old" / "server_app.py").write_text(
        "from flwr.serverapp import ServerApp\napp = ServerApp(server_fn=lambda context: None)"
    )
    assert "server_fn" in error(folder)


def test_a_serverapp_that_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_app(tmp_path, "raises", "raise ValueError('no such model')")
    simulated = run(folder)
    assert simulated.ending is AppEnding.FAILED
    assert simulated.reason == "the ServerApp raised ValueError: no such model"
    # The person's own lines, and none of those that called them.
    trace = capsys.readouterr().err
    assert "raises/server_app.py" in trace
    assert "raceme/simulation" not in trace


def test_a_serverapp_that_ends_the_process(tmp_path: Path) -> None:
    assert run(write_app(tmp_path, "exits", "raise SystemExit")).ending is AppEnding.RETURNED
    ended = run(write_app(tmp_path, "exits_with_3", "raise SystemExit(3)"))
    assert ended.reason == "the ServerApp ended the process with 3"


def test_ctrl_c_leaves_what_there_is(tmp_path: Path) -> None:
    main = "list(grid.send_and_receive(messages(grid)))\nraise KeyboardInterrupt"
    interrupted = run(write_app(tmp_path, "is_interrupted", main))
    assert interrupted.ending is AppEnding.INTERRUPTED
    assert len(interrupted.fleet.tasks) == 2


def test_a_clientapp_that_raises_half_of_the_time(tmp_path: Path) -> None:
    client = CLIENT.replace(
        '    return answer(msg, **{"num-examples": 10 * (1',
        "    if context.node_config['partition-id'] == 1:\n        raise ValueError('no data')\n"
        '    return answer(msg, **{"num-examples": 10 * (1',
    )
    start = (
        "FedAvg().start(grid, ArrayRecord([np.zeros(2)]), num_rounds=context.run_config['rounds'])"
    )
    simulated = run(write_app(tmp_path, "has_failures", start, client))
    assert simulated.ending is AppEnding.RETURNED
    failures = [task for task in simulated.fleet.tasks if task.failure]
    assert {task.client for task in failures} == {"client-1"}
    assert len(failures) == 2
    assert failures[0].failure is not None
    assert failures[0].failure.startswith("ValueError: no data\n")


OLD_SERVER = """
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg as OldFedAvg
from flwr.server.workflow import DefaultWorkflow
strategy = OldFedAvg(initial_parameters=ndarrays_to_parameters([np.zeros(4)]))
legacy = LegacyContext(context=context, config=ServerConfig(num_rounds=2), strategy=strategy)
DefaultWorkflow()(grid, legacy)
"""
OLD_CLIENT = """
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp


class Client(NumPyClient):
    def fit(self, parameters, config):
        return [values + 1 for values in parameters], 10, {}

    def evaluate(self, parameters, config):
        return 0.5, 10, {}


app = ClientApp(client_fn=lambda context: Client().to_client())
"""


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_thread_of_flowers_older_driver_interface_ends_silently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    simulated = run(write_app(tmp_path, "drives", OLD_SERVER, OLD_CLIENT))
    assert simulated.ending is AppEnding.RETURNED
    assert len(simulated.fleet.tasks) == 2 * 2 * 2
    assert not raised
    assert "Traceback" not in capsys.readouterr().err


def test_flowers_older_driver_interface_does_not_wait_for_clients_that_never_come(
    tmp_path: Path,
) -> None:
    server = OLD_SERVER.replace("OldFedAvg(", "OldFedAvg(min_available_clients=5, ")
    simulated = run(write_app(tmp_path, "waits_in_vain", server, OLD_CLIENT))
    assert simulated.ending is AppEnding.HALTED
    assert "min_available_clients" in simulated.reason


def test_flowers_older_driver_interface_waits_for_clients_on_virtual_time(tmp_path: Path) -> None:
    late = tmp_path / "late.toml"
    late.write_text("[[group]]\nclients = [1]\nonline = [[30, 1000]]")
    app = write_app(tmp_path, "waits_for_the_late", OLD_SERVER, OLD_CLIENT)
    simulated = simulate(Settings(app, 2, str(late), workers=0, out=tmp_path / "out"))
    assert simulated.ending is AppEnding.RETURNED
    assert min(task.sent for task in simulated.fleet.tasks) >= 30.0


def test_results_are_not_overwritten(tmp_path: Path) -> None:
    folder = write_app(tmp_path, "runs_twice", "pass")
    run(folder)
    assert "holds a run already" in error(folder)


def test_unknown_devices_and_methods(tmp_path: Path) -> None:
    folder = write_app(tmp_path, "is_simulated", "pass")
    assert "Unknown device profile 'slow'" in error(folder, devices="slow")
    assert "Unknown strategy 'caza'" in error(folder, strategy="caza")
    assert "--strategy" in error(folder, parameters={"casa.gamma": 0.2})
    assert "--run-config" in error(folder, strategy="casa", parameters={"lr": 0.2})
    assert "casa.gama" in error(folder, strategy="casa", parameters={"casa.gama": 0.2})
    assert "starts no strategy" in error(folder, strategy="casa")
    # What was wrong has left nothing that is in the way.
    assert run(folder).ending is AppEnding.RETURNED
