"""The folder of a run: made for a new one, found again for one that resumes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raceme.config import RunConfig, write_toml
from raceme.config.errors import UserError


def prepare_folder(config: RunConfig) -> Path:
    """Make the folder of a run and write its configuration.

    The configuration is written without the folder itself, so that feeding it back makes a new
    run and leaves this one alone.

    Raises
    ------
    UserError
        The folder holds a run already, or cannot be written.
    """
    if config.out:
        out = Path(config.out).expanduser().resolve()
    else:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        out = _unused(Path("runs").resolve() / f"{stamp}-{config.strategy}-{config.dataset}")
    if (out / "run.sqlite").exists():
        raise UserError(f"{out} holds a run already; choose another folder with --out.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_toml(config.with_values(out="", resume="").to_mapping(), out / "config.toml")
    except OSError as error:
        raise UserError(f"Cannot write to {out}: {error.strerror}.") from None
    return out


def resumed_folder(config: RunConfig) -> Path:
    """Return the folder of the run to resume.

    Raises
    ------
    UserError
        There is no run in it, or the results are to go elsewhere.
    """
    out = Path(config.resume)
    if not (out / "run.sqlite").is_file():
        raise UserError(f"There is no run in {out} to resume; expected a folder of results.")
    if config.out and Path(config.out).expanduser().resolve() != out:
        raise UserError(f"A run resumes in its own folder, {out}: leave out --out.")
    return out


def forget_end(config: RunConfig, out: Path) -> None:
    """Take back what an earlier end of a run has left that would not be overwritten.

    Limits may be others than they were, so the configuration is written anew.
    """
    for path in (out / "clusters").glob("*.safetensors"):
        path.unlink()
    write_toml(config.with_values(out="", resume="").to_mapping(), out / "config.toml")


def _unused(path: Path) -> Path:
    """Return the path, or with a number behind it if it exists: runs may start side by side."""
    candidate, number = path, 2
    while candidate.exists():
        candidate = path.with_name(f"{path.name}-{number}")
        number += 1
    return candidate


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Write what Raceme logs meanwhile to a file."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("raceme")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
