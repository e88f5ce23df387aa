"""The device agent: it carries out the actions of ``core.DraftSession`` on asyncio."""
