"""`fanin bench compression`: what compression makes of somebody's own gradients, and what it saves.

`methods` are the ways to send gradients, as data; `gradients` reads or makes what is sent; `ranks`
starts processes, here or in a laboratory, each of which is an `exchange`; `command` is the command.
"""
