"""A collective from its request to its future, whoever carries it: no device, no group, no Gloo.

`collectives` makes requests of tensors, `work` is what torch is given for them, `under_way` knows
those that are not over, `completions` takes what the network has done, and `turns` keeps the order
in which futures complete. It stands below `device` and `backend`, which both begin works.
"""
