"""What a run looked like: a page, tables and a timeline, of simulated and real runs alike."""
