"""CASA and CASA+: clustered federated learning with asynchronous clients."""
