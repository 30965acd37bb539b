"""Training of many clients together: the weights of all are stacked, on a GPU or a CPU."""
