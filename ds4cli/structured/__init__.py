"""Replies of a wanted form: JSON that fits a schema, a pattern, a grammar. Nothing here imports
MLX; llguidance is imported where a grammar is made."""
