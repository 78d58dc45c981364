"""The laboratory of fanin: shaped links, measurements, sweeps of scenarios, the papers' figures.

Nobody needs it to train. `fanin bench`, `netlab`, `profile`, `reproduce` and `sim --sweep` are its
commands; fanin hands their arguments to it (`fanin._cli`), and knows nothing else of it. It uses
fanin as any program does: by the command ``fanin`` and by the package `fanin`.
"""
