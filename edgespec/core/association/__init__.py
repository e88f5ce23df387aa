"""The choice of a verifier for each device: candidates, policies, and failover to another one."""
