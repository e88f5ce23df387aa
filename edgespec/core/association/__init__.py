"""Which verifier a device uses: candidates, policies, and when to go to another one."""
