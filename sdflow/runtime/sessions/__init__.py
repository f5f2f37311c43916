"""ONNX Runtime sessions of submodels: devices, bound tensors, weights on a device, shapes, tuning."""
