"""``python -m raceme`` is ``raceme``."""

from __future__ import annotations


def main() -> None:
    """Run the command line; Ctrl-C while it is imported ends it without a traceback."""
    try:
        from raceme.cli import main as command

        command()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
