"""Replay of the product's own sessions in virtual time.

The second interpreter of ``edgespec.core``: the same ``DraftSession`` and ``VerifyEngine`` that run
over gRPC run here on an event queue, so what is simulated is the product.
"""
