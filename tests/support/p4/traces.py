"""Recorded runs of a chip or its model: entries, frames in, frames out."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from controlplane.entities import Entity, MulticastGroup, TableEntry
from softswitch.codegen.program import Program
from softswitch.program.state import GroupReplica
from tests.softswitch.support.scenarios import CHECKMATE, add, load_program


@dataclass
class Trace:
    """A run: `on` names what it was, and each batch has a port, its frames, and all output by port."""

    on: str
    held: list[Entity]
    batches: list[tuple[int, list[bytes], dict[int, list[bytes]]]] = field(default_factory=list)

    def write(self, file: Path) -> None:
        """Write it, compressed; the same run gives the same bytes."""
        batches = [
            [port, _hex(frames), {out: _hex(came) for out, came in sorted(output.items())}]
            for port, frames, output in self.batches
        ]
        text = json.dumps(
            {"on": self.on, "held": [_plain(entity) for entity in self.held], "batches": batches}
        )
        file.write_bytes(gzip.compress(text.encode(), mtime=0))

    def program(self) -> Program:
        """Return the embedded target's program with the same entries."""
        program = load_program(CHECKMATE)
        for entity in self.held:
            if isinstance(entity, MulticastGroup):
                copies = tuple(GroupReplica(port, instance) for port, instance in sorted(entity.replicas))
                program.state.groups[entity.id] = copies
            elif isinstance(entity, TableEntry):
                key, values = (tuple(value for _, value in pairs) for pairs in (entity.match, entity.params))
                numbers = [value for value in values if isinstance(value, int)]
                add(program, entity.table, key, entity.action, *numbers, priority=entity.priority)
        return program


def read_trace(file: Path) -> Trace:
    """Return a recorded run."""
    data = json.loads(gzip.decompress(file.read_bytes()))
    trace = Trace(data["on"], list(_entities(data["held"])))
    for port, frames, output in data["batches"]:
        came = {int(out): _frames(texts) for out, texts in output.items()}
        trace.batches.append((port, _frames(frames), came))
    return trace


def _hex(frames: Sequence[bytes]) -> list[str]:
    return [frame.hex() for frame in frames]


def _frames(texts: Sequence[str]) -> list[bytes]:
    return [bytes.fromhex(text) for text in texts]


def _plain(entity: Entity) -> list[object]:
    if isinstance(entity, MulticastGroup):
        return [entity.id, sorted(entity.replicas)]
    assert isinstance(entity, TableEntry)
    return [entity.table, entity.match, entity.action, entity.params, entity.priority]


def _entities(rows: Iterable[list[object]]) -> Iterator[Entity]:
    for row in rows:
        match row:
            case [int(number), list(replicas)]:
                yield MulticastGroup(number, frozenset((port, instance) for port, instance in replicas))
            case [str(table), list(key), str(action), list(params), int(priority)]:
                yield TableEntry(table, _pairs(key), action, _pairs(params), priority)
            case _:
                raise ValueError(f"no entry: {row}")


def _pairs(rows: list[list[object]]) -> tuple[tuple[str, int | tuple[int, int]], ...]:
    return tuple(
        (str(name), (int(value[0]), int(value[1])) if isinstance(value, list) else int(str(value)))
        for name, value in rows
    )
