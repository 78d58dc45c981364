"""How the ranks of a group find each other: in a store, by address, and over connections.

Nothing here knows what a collective is.
"""
