"""Questions about busy scenes: drawn, asked, answered, and read by an embedded vision model."""
