"""A built pipeline for other programs: as one ONNX file."""
