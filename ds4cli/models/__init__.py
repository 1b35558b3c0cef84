"""Finding and loading models."""
