"""Tests, in folders that mirror the floors: core, sim, shell; the house rules at the top."""
