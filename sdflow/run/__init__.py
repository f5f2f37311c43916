"""Whole commands over a build: run, bake, init, fix, structures."""
