"""The embedded models: their data, their checkers, their weights."""
