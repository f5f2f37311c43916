"""Worker processes: one per step, forked from a server that has imported their packages; with Ray, on other nodes."""
