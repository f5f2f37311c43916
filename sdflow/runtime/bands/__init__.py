"""Run a VAE on bands of rows to save memory, with the same result as on the whole image.

`decompose` cuts the graph, `Bands` runs it.
"""
