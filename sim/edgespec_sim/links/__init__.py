"""Links and paths in virtual time, from settings or traces, over several hops."""
