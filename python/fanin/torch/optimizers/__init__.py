"""Optimizers that take DDP's place: overlapped, without the last worker, and at services that add.

Each is a class put before the class of the program's own optimizer (`wrapper`).
"""
