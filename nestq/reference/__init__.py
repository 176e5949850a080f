"""The specification of nestq in eager PyTorch: no Triton, no GPU, exact where arithmetic can be.

Every kernel is tested against these functions. They run on any device, but nothing selects them
on a GPU by accident: see ``nestq.ops.select_implementation``.
"""
