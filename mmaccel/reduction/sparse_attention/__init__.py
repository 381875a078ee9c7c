"""Methods that choose which cached keys a pass attends to."""
