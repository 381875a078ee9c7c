"""ComfyUI nodes: one table of nodes, exported in the schema that the installed ComfyUI has."""
