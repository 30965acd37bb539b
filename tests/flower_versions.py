"""Tests against releases of Flower: ``python -m tests.flower_versions 1.39 1.40 1.41 1.42``.

Makes an environment for each release (in ``--environments FOLDER``, kept if it is named), runs the
scenarios of `SCENARIOS` in it, and one fleet whose nodes have all of the releases; prints a table,
the one in ``docs/flower-users.md``. ``--nightly`` adds the newest nightly build of Flower, or tests
it alone without releases, to find problems before a release. ``--only`` selects scenarios by a part
of their names.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from tests.matrix import uv

ROOT = Path(__file__).resolve().parent.parent

SCENARIOS = {
    "virtual time, `raceme simulate`": [
        "tests/simulation/test_virtual_grid.py",
        "tests/simulation/test_apps.py",
    ],
    "in the place of an app's strategy, on Ray": ["tests/test_drop_in.py", "-k", "on_ray"],
    "`flwr run .` on a SuperLink with SuperNodes": ["tests/test_flower.py", "-k", "over_grpc"],
    "`flwr run .` on Ray": ["tests/test_flower.py", "-k", "casa_on_ray"],
    "`raceme serve` with devices": ["tests/fleet/test_served_grid.py", "tests/fleet/test_http.py"],
    "`raceme serve` with a SuperNode": ["tests/fleet/test_serve.py", "-k", "stock_supernode"],
    "`raceme serve` with TLS and keys": ["tests/fleet/test_serve.py", "-k", "tls"],
    "a SuperLink with `raceme device` and a SuperNode": [
        "tests/fleet/test_device.py",
        "-k",
        "stock_supernodes",
    ],
    "a SuperLink with TLS and keys": ["tests/fleet/test_device.py", "-k", "tls"],
}
NIGHTLY = "nightly"
MIXED = "one `raceme serve`, SuperNodes of all releases"


def main() -> None:
    """Run the matrix; exit with 1 if something does not work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("releases", nargs="*", help="e.g. 1.39 1.42")
    parser.add_argument("--nightly", action="store_true", help="the newest nightly build, too")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of scenarios' names")
    parser.add_argument("--environments", type=Path, help="folder to keep the environments in")
    arguments = parser.parse_args()
    releases = [*arguments.releases, *([NIGHTLY] if arguments.nightly else [])]
    if not releases:
        parser.error("name releases of Flower, or --nightly")

    def is_wanted(name: str) -> bool:
        return any(part in name for part in arguments.only)

    with ExitStack() as stack:
        folder = arguments.environments or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pythons = {release: environment(folder / release, release) for release in releases}
        rows = {
            name: [works(python, selection) for python in pythons.values()]
            for name, selection in SCENARIOS.items()
            if is_wanted(name)
        }
        if is_wanted(MIXED):
            rows[MIXED] = [mixed_fleet(pythons)] * len(pythons)
        heads = [
            version_of(python) if name == NIGHTLY else name for name, python in pythons.items()
        ]
    print(f"| | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join('yes' if cell else '**no**' for cell in cells)} |")
    sys.exit(not all(map(all, rows.values())))


def environment(folder: Path, release: str) -> Path:
    """Return the Python of an environment with a release of Flower; create it if it is missing."""
    python = folder / "bin" / "python"
    if (folder / "bin" / "flower-supernode").exists():
        return python
    uv("venv", "--quiet", "--seed", "--clear", "--python", sys.executable, folder)
    install = ("pip", "install", "--quiet", "--python", python)
    raceme = ("-e", f"{ROOT}[dev]")
    if release == NIGHTLY:
        # The nightly build is another distribution of the same package; Raceme's dependencies stay.
        uv(*install, *raceme)
        uv("pip", "uninstall", "--quiet", "--python", python, "flwr")
        uv(*install, "flwr-nightly")
    else:
        uv(*install, *raceme, f"flwr=={release}.*")
    return python


def version_of(python: Path) -> str:
    """Return the version of Flower in an environment."""
    code = "from raceme.flower import installed_flower; print(installed_flower()[1])"
    told = subprocess.run(
        [python, "-c", code], env=surroundings(python), check=True, capture_output=True, text=True
    )
    return told.stdout.strip()


def number_of(release: str) -> tuple[float, ...]:
    """Return a release as a comparable tuple; a nightly build is the newest."""
    return (math.inf,) if release == NIGHTLY else tuple(map(int, release.split(".")))


def works(python: Path, selection: Sequence[str]) -> bool:
    """Return whether the tests of a scenario pass; print their output if they fail."""
    command = [python, "-m", "pytest", "-n", "0", "-m", "slow or not slow", "--timeout", "900"]
    ended = subprocess.run(
        [*command, *selection], cwd=ROOT, env=surroundings(python), capture_output=True, text=True
    )
    if ended.returncode:
        print(ended.stdout[-4000:], ended.stderr[-2000:], file=sys.stderr)
    return ended.returncode == 0


def mixed_fleet(pythons: dict[str, Path]) -> bool:
    """Return whether SuperNodes of all releases train for a server with the newest release."""
    newest = pythons[max(pythons, key=number_of)]
    count = len(pythons)
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        grpc, http = (f"127.0.0.1:{free_port()}" for _ in range(2))

        def start(name: str, python: Path, *command: str) -> subprocess.Popen[bytes]:
            log = stack.enter_context((Path(place) / name).open("wb"))
            environment = {**surroundings(python), "FLWR_HOME": f"{place}/home-{name}"}
            process = subprocess.Popen(
                [python, *command], cwd=place, env=environment, stdout=log, stderr=log
            )
            stack.callback(end, process)
            return process

        run = ["--strategy", "fedavg", "--clients", str(count), "--clients-min", str(count)]
        limits = ["--max-updates", str(count), "--eval-every", "1000", "--out", "out"]
        ports = ["--address", grpc, "--http", http, "--metrics", "off"]
        server = start("server", newest, "-m", "raceme", "serve", *run, *limits, *ports)
        for number, (release, python) in enumerate(pythons.items()):
            speaks_http = number_of(release) >= (1, 40)
            start(
                f"node-{release}",
                python,
                str(python.parent / "flower-supernode"),
                *("--insecure", "--superlink", http if speaks_http else grpc),
                *("--port", str(free_port())),
                *("--node-config", f"partition-id={number} num-partitions={count}"),
            )
        try:
            ended = server.wait(600) == 0
        except subprocess.TimeoutExpired:
            ended = False
        if not ended:
            for log in sorted(Path(place).glob("*")):
                if log.is_file():
                    print(f"--- {log.name}\n{log.read_text()[-2000:]}", file=sys.stderr)
        return ended


def surroundings(python: Path) -> dict[str, str]:
    """Return the environment variables for processes of an environment."""
    return {
        **os.environ,
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RACEME_ANY_VERSION": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    """Return a port that is free now."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    main()
