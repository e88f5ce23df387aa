"""What both ends of a stream share: messages, the sampling law, prefix, tree and work orders."""
