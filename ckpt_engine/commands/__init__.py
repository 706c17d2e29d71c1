"""The commands of ``ckpt-engine``, one module each, holding a function of the same name."""
