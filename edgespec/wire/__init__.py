"""Transports between a device agent and a verifier: gRPC, and links with emulated delays."""
