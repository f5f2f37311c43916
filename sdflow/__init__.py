"""sdflow: declarative Stable Diffusion pipelines on ONNX Runtime."""

__version__ = "0.1.0"
