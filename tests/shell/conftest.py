"""The manager that sessions of these tests speak with."""

from tests.agent.plain_manager import plain_manager

__all__ = ["plain_manager"]
