"""Differentiable neural-network kernels for JAX."""
