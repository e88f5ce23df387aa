"""The verifier's driver: carries out what ``core.VerifyEngine`` asks, on asyncio."""
