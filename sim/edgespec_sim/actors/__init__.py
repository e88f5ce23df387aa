"""Devices, verifiers and streams in virtual time: the product's own sessions, acting."""
