"""Records of a run: traces, recordings, metrics and logs."""
