"""Estimate whether a pipeline fits a device's memory, before anything is built."""
