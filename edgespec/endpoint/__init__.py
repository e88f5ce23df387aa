"""OpenAI's HTTP API in front of an agent (``edgespec serve``)."""
