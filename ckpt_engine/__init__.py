"""Ckpt-engine: each training step's weights, in every inference server, exactly."""
