"""``python -m raceme`` is ``raceme``."""

from raceme.cli import main

if __name__ == "__main__":
    main()
