"""The verifier's driver: carries out the actions of ``core.VerifyEngine`` on asyncio."""
