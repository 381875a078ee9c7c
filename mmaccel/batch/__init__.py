"""Batch generation: prompt files, jobs with a manifest, workers and Ray actors."""
