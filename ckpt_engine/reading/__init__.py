"""Reads a version that the cluster holds, for non-members: `reader` brings its tensors, `pulling` writes files."""
