"""ComfyUI nodes: one table of nodes, written out in the schema the ComfyUI at hand knows."""
