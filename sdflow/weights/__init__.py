"""Graphs with symbolic weights, built once per architecture, and binding of weights into them in seconds."""
