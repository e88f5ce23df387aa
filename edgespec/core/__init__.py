"""Pure machines of speculative decoding between a device and a verifier.

Nothing in this package does I/O, reads a clock, spawns anything or imports more than the standard
library. ``DraftSession`` and ``VerifySession`` are driven by ``handle(event, now)``; see
``docs/life-of-a-token.md`` for one token's way through both.
"""
