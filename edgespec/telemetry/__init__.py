"""What a run leaves behind: the trace of both sides' events and actions."""
