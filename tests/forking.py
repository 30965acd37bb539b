"""`raceme` commands in forked copies of one process that has imported everything, once.

A line of JSON on standard input starts a command: the files for its output and errors, additional
environment variables, and the arguments. Its process id is printed at once, and its exit code when
it has ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from painting import PAINTED, paint_only_if_told

ROOT = Path(__file__).resolve().parent.parent


class Commands:
    """The parent process's interface.

    Parameters
    ----------
    process : subprocess.Popen
        The process that runs this file.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._child: int | None = None

    def start(
        self,
        *arguments: str,
        output: Path,
        errors: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> int:
        """Start a command in the folder of its output files; return its process id."""
        assert self._process.stdin
        self.end()
        output.touch()
        files = [str(output), str(errors or output)]
        given = {PAINTED: os.environ.get(PAINTED, ""), **(environment or {})}
        self._process.stdin.write(json.dumps([*files, given, *arguments]) + "\n")
        self._process.stdin.flush()
        self._child = int(self._answer())
        return self._child

    def exit_code(self) -> int:
        """Wait for the end of the command; a signal is a negative number."""
        code = int(self._answer())
        self._child = None
        return code

    def end(self) -> None:
        """Kill a command that its test has not waited for, for example after a timeout."""
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)
            self.exit_code()

    def run(self, *arguments: str, output: Path) -> int:
        """Start a command and wait for its end."""
        self.start(*arguments, output=output)
        return self.exit_code()

    def typed(
        self, folder: Path, *arguments: str, site: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a folder, with the terminal width of this process.

        With `site`, the packages in this folder can be imported.
        """
        own = {name: os.environ[name] for name in ("COLUMNS",) if name in os.environ}
        if site is not None:
            own |= {"SITE": str(site), "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)])}
        output, errors = folder / ".output", folder / ".errors"
        self.start(*arguments, output=output, errors=errors, environment=own)
        code = self.exit_code()
        written = [path.read_text() for path in (output, errors)]
        for path in (output, errors):
            path.unlink()
        return subprocess.CompletedProcess(["raceme", *arguments], code, *written)

    def _answer(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline()


@contextmanager
def commands() -> Iterator[Commands]:
    """Provide the command line, without the time that it takes to start."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    opened = Commands(process)
    try:
        yield opened
    finally:
        # Otherwise `communicate` would never return.
        opened.end()
        process.communicate()


def _serve() -> None:
    # Imports for a run; no computation happens before the fork, so that there are no threads yet.
    import raceme.client_app
    import raceme.runs.experiment  # noqa: F401
    from raceme.cli import main

    paint_only_if_told()
    for line in sys.stdin:
        output, errors, environment, *arguments = json.loads(line)
        child = os.fork()
        if not child:
            # As in a terminal, even if the tests ignore SIGHUP.
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            os.environ |= environment
            sys.path += filter(None, [environment.get("SITE")])
            log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            if errors != output:
                log = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 2)
            os.chdir(os.path.dirname(output))
            sys.argv = ["raceme", *arguments]
            try:
                main()
            except SystemExit as end:
                sys.stdout.flush()
                os._exit(int(end.code or 0))
            os._exit(1)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
