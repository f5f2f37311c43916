"""Compare engines on one pipeline (`sdflow bench`), and find the best options for a machine (`sdflow tune`)."""
