"""Run a VAE in bands of rows whose result is that of the whole image: `decompose` cuts the graph, `Bands` runs it."""
