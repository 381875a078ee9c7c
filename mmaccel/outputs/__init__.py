"""Files of results: images, sound and clips, with metadata on how they were generated."""
