"""The embedded models: data makers, checkers, training and weights."""
