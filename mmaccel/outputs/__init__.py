"""What results are written as, and what they say of where they were made."""
