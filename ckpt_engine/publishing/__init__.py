"""Publishing a directory for callers that have no trainer.

`roots` says which directories may be published, `publisher` does it in a process of its own, and `frames` is how that
process and the manager that started it speak.
"""
