"""Engines of others behind the verifier: each is a ``ports.TargetModel`` of its own package."""
