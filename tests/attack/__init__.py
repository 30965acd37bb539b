"""Attackers of many kinds, and what must hold whatever they do.

``python -m tests.attack --minutes 10`` plays cases in turn, of every category, until the time is
over, and prints how many there were of each, and what was found. A case is decided by its category,
its subject and its seed: what is found is played again by ``--case replies/casa/17``.
"""

import sys
from pathlib import Path

# The helpers of all tests, as pytest finds them.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
