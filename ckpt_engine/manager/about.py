"""Which software this is."""

from importlib.metadata import PackageNotFoundError, version


def software_version() -> str:
    """The installed package's version, or "source" when it runs from a checkout that is not installed."""
    try:
        return version("ckpt-engine")
    except PackageNotFoundError:
        return "source"
