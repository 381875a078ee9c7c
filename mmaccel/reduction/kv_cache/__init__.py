"""Methods that evict cached keys and values."""
