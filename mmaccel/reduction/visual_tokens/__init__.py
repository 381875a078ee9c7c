"""Visual tokens: choose, merge and restore; one method a file."""
