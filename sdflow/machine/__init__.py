"""What is installed on this machine, and what it has: packages, ONNX Runtime and its providers, processor and devices.

Nothing is imported before it is asked for: a plan asks for versions and loads no library.
"""
