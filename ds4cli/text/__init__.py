"""Tokens and text. No mlx."""
