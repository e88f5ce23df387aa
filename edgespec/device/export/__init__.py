"""Export of draft models to ONNX graphs."""
