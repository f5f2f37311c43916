"""ONNX models as files and as protobuf messages: what passes, the binding of weights and the runtime share."""
