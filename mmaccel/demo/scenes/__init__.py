"""Captioned images of simple scenes: drawn, described, checked, and seen by a small network."""
