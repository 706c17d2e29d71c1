"""Reads JSON from elsewhere. It decides that too deep a nesting is an error like any other in the text. It does not
decide what the content must be. Pure."""

from __future__ import annotations

import json
from typing import Any

TOO_DEEP = "it is nested too deeply"
TOO_LONG = "it has a number of more than 4,300 digits"


def load_json(text: str | bytes, **hooks: Any) -> Any:
    """Parses as json.loads does, with its hooks. Raises ValueError, also for a text that is nested too deeply."""
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        if "set_int_max_str_digits" not in str(error):
            raise
        raise ValueError(TOO_LONG) from None
