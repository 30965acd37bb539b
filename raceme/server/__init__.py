"""The loop that runs every method, and its bookkeeping: clients, work, replies, evaluations."""
