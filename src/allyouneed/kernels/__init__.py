"""GPU kernels. Nothing here is imported before it is needed: it needs Triton."""
