"""The device's half of a generation: what to draft, what to send, when to reconnect."""
