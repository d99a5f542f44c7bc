"""Programs on a GPU, printed as Triton kernels.

- ``spans``: the values of a program, cut into variables
- ``instructions``, ``printer``: the text of the instructions of a step, and of a kernel
- ``functions``: the functions that kernels call
- ``places``: the order of the sequences on the device, and the chunks of long ones
- ``linear``: the loops whose chunks can run side by side
- ``launch``: compiles and launches kernels
"""
