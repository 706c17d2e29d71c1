"""Reading a version that the cluster holds, by who is no member: `reader` brings its tensors, `pulling` writes them."""
