"""The parts of ``edgespec chat``: its editor, commands, conversations, and how a reply is shown."""
