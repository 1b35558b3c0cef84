"""What is attached to a model's own modules."""
