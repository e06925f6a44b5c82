"""Everything that the rules may look at: facts, the quantisation scheme, and what to call the source in commands."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import cached_property

from nextn.inspect.facts import Facts
from nextn.inspect.quant.claims import Claims
from nextn.inspect.quant.scheme import Scheme


@dataclass(frozen=True)
class Case:
    """A checkpoint under inspection.

    Attributes:
        facts: from headers.
        schemes: quantisation declarations, the one that engines read first; empty where nothing is declared.
    """

    facts: Facts
    schemes: tuple[Scheme, ...] = ()

    @cached_property
    def claims(self) -> Claims:
        return Claims(self.facts, self.scheme)

    @property
    def scheme(self) -> Scheme | None:
        return self.schemes[0] if self.schemes else None

    @property
    def source(self) -> str:
        """What the user named, quoted for a shell."""
        return shlex.quote(self.facts.checkpoint.source)
