"""The operators in C++, for a CPU: the bits of ``nestq.reference``, in a fraction of its time."""
