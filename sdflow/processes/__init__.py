"""Worker processes: one for each step, forked from a server that has imported what they need; on Ray, on other nodes."""
