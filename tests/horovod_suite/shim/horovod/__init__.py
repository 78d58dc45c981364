"""Stands in for Horovod before its own tests: what they import is fanin's."""
