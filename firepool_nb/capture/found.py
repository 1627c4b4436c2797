"""What the analysis of a cell finds."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CellNames", "Use"]


@dataclass(frozen=True)
class Use:
    """Where a name is first read.

    Attributes
    ----------
    name
        The name as Python knows it.
    line
        Line in the analysed source, from 1.
    scopes
        Functions and classes of the cell that the read stands in, outermost first.
    certain
        Whether the cell cannot run to its end without the name.
    """

    name: str
    line: int
    scopes: tuple[str, ...] = ()
    certain: bool = True


@dataclass
class CellNames:
    """What `analyse` found.

    Attributes
    ----------
    reads
        Names the cell reads from outside, with their first use.
    bound
        Names bound at the top level of the cell, on some path.
    changed
        Names that the cell changes, with the ways: ``binding``, ``part`` (of an item or an
        attribute) or the name of a method that changes its object by convention.
    imports
        Absolute names of modules that the cell imports, anywhere in it.
    imported
        Names that an import binds at the top level, with the statement that does.
    ends_with_value
        Whether the last statement is an expression, whose value is the cell's.
    dynamic
        Whether the cell can define or read names that the analysis cannot see.
    """

    reads: dict[str, Use] = field(default_factory=dict)
    bound: set[str] = field(default_factory=set)
    changed: dict[str, set[str]] = field(default_factory=dict)
    imports: set[str] = field(default_factory=set)
    imported: dict[str, str] = field(default_factory=dict)
    ends_with_value: bool = False
    dynamic: bool = False
