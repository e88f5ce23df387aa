"""Model sources and their text side: location and description of a model, and its tokenizer.

This file imports nothing.
"""
