"""Draft models made into ONNX graphs: our own exporter, and others in processes of their own."""
