"""Communication hooks of DDP: gradients by fanin, beside a backend for all else.

`fanin.torch.compression` has a hook of its own, on any backend.
"""
