"""Implementations of whole commands: run, bake, init, fix, structures."""
