"""Where guesses come from; README.md beside this says how drafting works."""
