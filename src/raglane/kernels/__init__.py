"""The kernels: what executes a cell on a schedule."""
