"""Export a built pipeline for other programs: as one ONNX file, or as a page for browsers."""
