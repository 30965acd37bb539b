"""Features that any method can run with, one folder each; see :mod:`raceme.core.feature`."""
