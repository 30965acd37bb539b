"""What methods share: clusters and their models, similarity, decay, buffers, ways to divide."""
