"""BytePS' interfaces: `import fanin.byteps.torch as bps` in place of `byteps.torch`."""
