"""Several processes, on one machine or more, that hold one model together."""
