"""Strategies in a user's own Flower app, in the place of one of Flower's strategies."""
