"""Any cell on the cpu kernels, as a program made of its equations in plain torch."""
