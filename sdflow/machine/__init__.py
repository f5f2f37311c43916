"""Inspects this machine: packages, ONNX Runtime and its providers, processor and devices.

Libraries are imported on use only: planning reads versions and loads none.
"""
