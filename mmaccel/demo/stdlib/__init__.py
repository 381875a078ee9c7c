"""Source text that every machine has: the standard library, and the modules held out of it."""
