"""What is loaded, the sessions over it, and the speculative loop."""
