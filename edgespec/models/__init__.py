"""Model folders and their text side: where a model is, what it says of itself, its tokenizer.

Nothing is imported here.
"""
