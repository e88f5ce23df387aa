"""Reports of simulated and real runs: a page, tables and a timeline."""
