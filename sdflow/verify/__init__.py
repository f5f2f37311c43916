"""Proves that an artifact computes what the PyTorch model computes, for any target, on a CPU."""
