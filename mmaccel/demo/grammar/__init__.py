"""A grammar of seven tasks whose right answers can be enumerated."""
