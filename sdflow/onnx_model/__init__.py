"""ONNX models as files and protobuf messages: code shared by passes, weight binding and the runtime."""
