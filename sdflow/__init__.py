"""sdflow: declarative Stable Diffusion pipelines on ONNX Runtime.

Programs import `Pipeline` from `sdflow.runtime.pipeline` to draw, `Pass` and `PassConfig` from `sdflow.passes.base` for passes of
their own, and `deploy`, `query` and `terminate` from `sdflow.serve.client` for servers. All else is there for the commands, and
may change.
"""

__version__ = "0.1.0"
