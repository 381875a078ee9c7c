"""Reduction: what a model computes and looks at is cut down."""
