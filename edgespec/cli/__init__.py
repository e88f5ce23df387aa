"""The command line: composes all parts, and is the only place that prints."""
