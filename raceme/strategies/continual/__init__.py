"""Methods for clients that meet one task after another: EWC, Stable SGD, APD and FedWeIT."""

# Names of kinds of work, records and settings that both halves of the method use.

TRAIN_ELASTIC = "train-elastic"
"""Train, and stay where weights matter for former tasks (EWC): the kind of work."""
ELASTIC_STRENGTH = "elastic-strength"
ELASTIC_MEMORY = "elastic-memory"
"""Share of former tasks' Fisher information that is left when the next one's is added."""
TRAIN_DECOMPOSED = "train-decomposed"
"""Train weights that are made of a shared part, the model, and of parts for each task (APD)."""
TRAIN_BORROWING = "train-borrowing"
"""The same, where parts of other clients' tasks are borrowed (FedWeIT)."""
SPARSITY = "sparsity"
"""Strength of the L1 norm of what is a task's own."""
DRIFT_STRENGTH = "drift-strength"
"""Strength with which former tasks' weights are held where they were when the task began."""
OTHERS = "others"
"""Record with the task-adaptive weights of other clients, each as indices and values."""
ADAPTIVE_INDICES = "adaptive-indices"
ADAPTIVE_VALUES = "adaptive-values"
"""Positions of a client's task-adaptive weights other than 0, int32, and their values, float32,
which come back with the shared part. In the record of others' the names end with a client's number.
"""
TASK_PARTS = "task-parts"
"""The completion that adds to the shared part of decomposed weights the client's own for a task."""
