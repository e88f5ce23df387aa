"""Pure machines of speculative decoding between a device and a verifier.

Nothing in this package does I/O, reads a clock, starts a thread or process, or imports more than
the standard library. ``DraftSession`` and ``VerifySession`` are driven by ``handle(event, now)``.
``docs/life-of-a-token.md`` follows one token through both.
"""
