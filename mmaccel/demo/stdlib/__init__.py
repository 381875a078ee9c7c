"""`stdlib`, a small language model of Python source: its modules, prompts and scores."""
