"""Long documents of statements and fillers, with questions that have one right answer."""
