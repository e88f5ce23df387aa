"""Draft models: one sequence in a cache, truncated and extended step by step.

No library is imported here, so that a device that only receives the stream needs neither numpy nor
onnxruntime.
"""
