"""Collectives of arrays: NumPy's, and those of whatever hands its memory over by DLPack.

`connecting` finds the other ranks, `group` has the collectives. The services do what they can do;
for the rest `peers` has TCP connections from rank to rank. Nothing here knows torch.
"""
