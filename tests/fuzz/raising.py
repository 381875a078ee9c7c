"""A module that cannot be imported."""

raise ZeroDivisionError("while it is imported")
