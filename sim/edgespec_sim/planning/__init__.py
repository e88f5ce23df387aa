"""Answers without playing every event: plans, bounds, mean fields, and how sure they are."""
