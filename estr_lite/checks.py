"""Checks of configured values: an error names the field, the value, and what would be right."""

from __future__ import annotations

from math import inf


def require_positive(owner: object, **values: float) -> None:
    """Raise ValueError naming the first value that is not a finite number above 0."""
    for name, value in values.items():
        if not 0 < value < inf:
            raise ValueError(f"{type(owner).__name__}.{name} must be above 0 and finite, got {value}.")


def require_within(owner: object, least: float, most: float, **values: float) -> None:
    """Raise ValueError naming the first value that is not a finite number in [least, most]."""
    for name, value in values.items():
        if not (least <= value <= most and value < inf):
            limit = "and finite" if most == inf else f"and at most {most:g}"
            raise ValueError(f"{type(owner).__name__}.{name} must be at least {least:g} {limit}, got {value}.")


def require_at_least(owner: object, least: float, **values: float) -> None:
    """Raise ValueError naming the first value that is below `least` or not finite."""
    require_within(owner, least, inf, **values)
