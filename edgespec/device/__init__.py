"""The device's driver: carries out what ``core.DraftSession`` asks, on asyncio."""
