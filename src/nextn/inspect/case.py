"""Everything that the rules may look at: facts, the quantisation scheme, and what to call the source in commands."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nextn.checkpoint.gguf import split_names
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
    def is_gguf(self) -> bool:
        return self.facts.checkpoint.kind == "gguf"

    @property
    def is_remote(self) -> bool:
        """Whether a hub repository was named, cached or not."""
        checkpoint = self.facts.checkpoint
        named = Path(checkpoint.source)
        return checkpoint.root not in (named, named.parent)

    @cached_property
    def place(self) -> str:
        """What an engine is given: the folder or the repository, of a GGUF the first file."""
        checkpoint = self.facts.checkpoint
        source = checkpoint.source
        if self.is_gguf:
            if source.endswith(".gguf"):
                return str(Path(source).parent / split_names(Path(source).name)[0])
            return str(Path(source) / min((*checkpoint.files, *checkpoint.absent_files)))
        return str(Path(source).parent) if source.endswith(".safetensors") else source

    @property
    def source(self) -> str:
        """`place`, quoted for a shell."""
        return shlex.quote(self.place)

    @property
    def named(self) -> str:
        """What a command of nextn is given, quoted for a shell: the name that stands for the place, if there is one."""
        return self.facts.checkpoint.name or self.source

    def on_disk(self, command: str) -> str:
        """A command of nextn over ``{here}``, a folder; a hub repository is downloaded first."""
        if not self.is_remote:
            return command.replace("{here}", self.named)
        folder = shlex.quote(self.place.rpartition("/")[2])
        return f"hf download {self.source} --local-dir {folder} && {command.replace('{here}', folder)}"

    def take_from(self, donor: str) -> str:
        """The command that puts another checkpoint's head in this one's place."""
        if self.facts.alone:
            return f"nextn extract {donor} OUT"
        replace = " --replace" if self.facts.head or self.facts.foreign else ""
        return self.on_disk(f"nextn merge {{here}} {donor} OUT{replace}")

    def rewrite(self) -> str:
        """The command that writes the checkpoint anew with its own head; where that is damaged, with the base's."""
        facts = self.facts
        doubled = any(t.spec.experts == "split" for t in facts.head.values()) and facts.stacked
        if not facts.complete or facts.unexpected or doubled:
            return self.take_from("BASE")
        if facts.alone:
            return self.on_disk("nextn merge BASE {here} OUT --replace")
        return self.on_disk("nextn merge {here} {here} OUT --replace")
