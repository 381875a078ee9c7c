"""Batch generation: many prompts, one worker, a manifest that can be trusted."""
