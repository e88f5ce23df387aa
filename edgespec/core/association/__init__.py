"""Which verifier a device uses: policies, and the small network that a learned one runs on."""
