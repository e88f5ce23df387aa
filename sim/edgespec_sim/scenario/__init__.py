"""Scenarios: what a simulated world consists of, as YAML that explains itself."""
