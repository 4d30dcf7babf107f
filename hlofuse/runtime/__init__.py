"""Where kernels become machine code and run: builders, the disk cache, the bridge into JAX's own runtime, and an
executor on other libraries' arrays."""
