"""Links between a device agent and a verifier: gRPC, in memory, and shaped ones."""
