"""FedRC: clusters of clients whose labels mean different things."""

# Names of kinds of work, records and settings that both halves of the method use.

LABEL_MASSES = "label-masses"
"""Mass of each class of its samples that a client assigns to each of several models (FedRC): the
kind of work, and the numbers, float64, shape (models, classes)."""
TRAIN_WEIGHTED = "train-weighted"
"""Train with samples weighted by how much they are assigned to the received model (FedRC)."""
MIXING = "mixing"
"""Record with ω of the client: share of each model in its samples. Float64, shape (models,)."""
LABEL_TABLE = "label-table"
"""Record with C: share of each class in what is assigned to a model. Shape (models, classes)."""
WEIGHTED_BY = "weighted-by"
"""By which of the models' shares samples are weighted in training: a setting, from 0."""
