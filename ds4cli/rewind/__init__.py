"""What a model has consumed, and how it goes back."""
