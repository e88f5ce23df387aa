"""Training a draft on its target; torch and transformers are loaded by the command that trains."""
