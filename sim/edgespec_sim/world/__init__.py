"""The world of a scenario in virtual time: users, networks, verifiers and measurements."""
