"""One adapter per mlx-lm cache: the only code that moves a layer back, forwards or aside."""
