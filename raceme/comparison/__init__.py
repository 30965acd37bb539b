"""Several methods on the same clients, devices, seeds and clock: suites, runs, tables, plots."""
