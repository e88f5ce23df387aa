"""Parts that both ends of a stream share: messages, the sampling law, prefix, tree, work orders."""
