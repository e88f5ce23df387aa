"""Draft models: one sequence in a cache, truncated and extended step by step.

Nothing is imported here, so that a device that only receives the stream needs neither numpy nor
onnxruntime.
"""
