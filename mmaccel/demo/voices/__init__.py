"""Sentences of a closed list of words, and the words themselves."""
