"""Programs: one step of a cell as data, made of its equations in plain torch.

- ``step``: a cell with the weights of a call; ``keys``: the key of its program
- ``trace``, ``row_counts``: the step runs on symbolic tensors, which records its operations
- ``rules``, ``products``: the translation of torch's operations to nodes of a graph
- ``formulas``, ``expressions``: pointwise operations and those on rows, written as mathematics
- ``parameters``: what is computed from parameters only, before each run
- ``graph``: operations on columns; ``gradients``: the gradients, as more nodes of the same graph
- ``program``, ``lower``: instructions on blocks, and the way to them from a graph
- ``compiled``: the forward and backward programs of a traced step
- ``stored``: traces on the disk
"""
