"""Tests, in folders that mirror the packages; the rules of the house are at the top."""
