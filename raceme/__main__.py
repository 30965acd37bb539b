"""``python -m raceme`` is ``raceme``."""

from __future__ import annotations

from raceme.cli import main

if __name__ == "__main__":
    main()
