"""What is changed in torch itself, once a process, and only where a group of fanin's needs it.

A change that a torch does not allow is left out with a warning (`installed`). Nothing here knows
what a collective is.
"""
