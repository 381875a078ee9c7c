"""Batch generation: prompt files, jobs with a manifest, and workers."""
