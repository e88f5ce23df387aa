"""Target models behind ``ports.TargetModel``.

``toy`` needs nothing but the standard library; ``torch_target`` needs torch and transformers and
is imported by name, never from here.
"""
