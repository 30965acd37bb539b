"""The loop, the strategy's interface, scheduling, clients, clusters, evaluation, options."""
