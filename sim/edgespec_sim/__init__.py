"""Replay of the product's own sessions in virtual time.

This is the second interpreter of ``edgespec.core``: the same ``DraftSession`` and ``VerifyEngine``
that run over gRPC run here on an event queue, so the simulator exercises the product itself.
"""
