"""The client side: local training, kinds of work, networks, statistics."""
