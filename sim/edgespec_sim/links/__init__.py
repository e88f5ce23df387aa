"""Links and paths in virtual time: from traces, over several hops, loaded and handed over."""
