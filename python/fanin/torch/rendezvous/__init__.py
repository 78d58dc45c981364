"""How the ranks of a group find each other: in a store, and by address.

Nothing here knows what a collective is.
"""
