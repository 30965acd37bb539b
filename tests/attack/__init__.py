"""Attackers of many kinds, and the guarantees that must hold against them.

``python -m tests.attack --minutes 10`` plays cases in turn, of every category, until the time is
over, and prints how many there were of each, and what was found. A case is determined by its
category, subject and seed; ``--case replies/casa/17`` repeats one.
"""

import sys
from pathlib import Path

# Makes the test helpers importable, as pytest does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
