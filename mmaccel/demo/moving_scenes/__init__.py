"""Captioned clips of moving shapes: what `moving-scenes` learns from, and what judges it."""
