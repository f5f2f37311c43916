"""Engines side by side on one pipeline (`sdflow bench`), and the options that suit a machine (`sdflow tune`)."""
