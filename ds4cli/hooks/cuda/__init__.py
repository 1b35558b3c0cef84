"""Other forms of what MLX and mlx-lm run slowly on CUDA.

MLX's attention makes a plan for every new number of rows and keys, so each block of a growing text
pays for one; and mlx-lm has kernels for its recurrences on Metal only. `use` gives a loaded model's
own modules attention as products for calls of a few rows, and a kernel for each recurrence.
`switch.py` says whether.
"""
