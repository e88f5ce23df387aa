"""What a run leaves behind: traces, tapes, metrics and logs."""
