"""Several timelines in one model call, each exactly as alone."""
