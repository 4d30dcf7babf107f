"""Where kernels become machine code and run: builders, the disk cache, and the bridge into JAX's own runtime."""
