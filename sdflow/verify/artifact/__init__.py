"""The artifacts under test: their results, their differences from PyTorch, and the verdict."""
