"""FedRC: clusters of clients whose labels mean different things."""

# Names of kinds of work, records and settings that both halves of the method use.

LABEL_MASSES = "label-masses"
"""Kind of work, and its answer: the client's responsibilities of each model, summed by class of its
samples (FedRC), float64, shape (models, classes)."""
TRAIN_WEIGHTED = "train-weighted"
"""Kind of work: train with samples weighted by the received model's responsibilities (FedRC)."""
MIXING = "mixing"
"""Record with ω of the client: share of each model in its samples. Float64, shape (models,)."""
LABEL_TABLE = "label-table"
"""Record with C: share of each class in the mass assigned to a model. Shape (models, classes)."""
WEIGHTED_BY = "weighted-by"
"""Setting: index, from 0, of the model whose responsibilities weight the samples in training."""
