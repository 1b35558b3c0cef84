"""What differs between machines: which BLAS, which float32."""
