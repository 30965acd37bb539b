"""Methods that group clients by what they state of their data: PACFL, FLUX and CFL-GP."""

# Names of kinds of work, records and settings that both halves of the methods use.

PRINCIPAL_DIRECTIONS = "principal-directions"
"""The main directions of the raw samples of each class (PACFL): the kind of work, and the numbers,
float32, shape (size of a sample, directions), columns of length 1."""
PER_CLASS = "directions-per-class"
"""How many of each class: a setting."""
IN_ALL = "directions-in-all"
"""How many together, of each class by its share: a setting; 0 for none of the kind."""

LATENT_MOST = "latent-most"
"""The largest latent feature of the training samples under the received model (FLUX): the kind of
work, the metric that answers it, and a setting of the next kind."""
DESCRIPTORS = "descriptors"
"""Means and standard deviations of latent features, of all samples and of each class (FLUX): the
kind of work, and the numbers, float32, shape (1 + classes, 2, dimensions)."""
LATENT_DIMENSIONS = "latent-dimensions"
LATENT_SEED = "latent-seed"
ABSENT = -1.0
"""What stands for the moments of a class of which a client has no sample."""

GRADIENT = "gradient"
"""The gradient of the mean loss of all training samples at the received model (CFL-GP): the kind of
work, and the numbers, float32, shape (weights,), in the order of the model's arrays."""
