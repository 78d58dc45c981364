"""Tensors of devices: through pinned host memory and back, segment by segment.

`copies` is what a device has to fulfil, `cuda` fulfils it. Nothing here knows what a group is.
"""
