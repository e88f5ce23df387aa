"""The verifier's half: sessions, the passes they share, and what a pass may cost."""
