"""The artifacts under test: what they compute, where they differ, and whether that passes."""
