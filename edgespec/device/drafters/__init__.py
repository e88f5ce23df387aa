"""Draft models: one sequence in a cache, truncated and extended step by step.

This package imports no library, so that a device that only receives a stream needs neither numpy
nor onnxruntime.
"""
