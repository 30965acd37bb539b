"""Clustering by profiles of clients' data: PACFL, FLUX and CFL-GP."""

# Names of kinds of work, records and settings that both halves of the methods use.

PRINCIPAL_DIRECTIONS = "principal-directions"
"""Principal directions of the raw samples of each class (PACFL): request, and its answer, float32,
shape (sample size, directions), columns of length 1."""
PER_CLASS = "directions-per-class"
"""Setting: number of directions of each class."""
IN_ALL = "directions-in-all"
"""Setting: total number of directions, divided by the classes' shares; 0 for none."""

LATENT_MOST = "latent-most"
"""Largest latent feature of the training samples under the received model (FLUX): request, metric
of its answer, and a setting of DESCRIPTORS."""
DESCRIPTORS = "descriptors"
"""Means and standard deviations of latent features, of all samples and of each class (FLUX):
request, and its answer, float32, shape (1 + classes, 2, dimensions)."""
LATENT_DIMENSIONS = "latent-dimensions"
LATENT_SEED = "latent-seed"
ABSENT = -1.0
"""Value of the moments of a class without samples."""

GRADIENT = "gradient"
"""Gradient of the mean loss of all training samples at the received model (CFL-GP): request, and
its answer, float32, shape (weights,), in the order of the model's arrays."""
