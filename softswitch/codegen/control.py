"""Ingress and egress controls as Python source.

The graph of tables and conditions becomes nested `if`s. A branch is emitted up to the node where its arms
meet again (the immediate post-dominator), and the code after that node is emitted once. An unstructured or
too deep graph becomes the branches of a loop instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from graphlib import TopologicalSorter

from softswitch.codegen.emitter import Emitter, parse_hex
from softswitch.codegen.primitives import emit_action, emit_meter
from softswitch.codegen.values import Value, fit, number, variable
from softswitch.program.bmv2 import Json, fragment, where
from softswitch.program.state import Table

MAX_NESTING = 40
MAX_DUPLICATION = 4
MISSING = object()
"""The index has no result yet; `None` is a miss."""


class Graph:
    """One pipeline's nodes, by name; `None` is the end of the control."""

    def __init__(self, pipeline: Json) -> None:
        self.tables: dict[str, Json] = {t["name"]: t for t in pipeline["tables"]}
        self.conditions: dict[str, Json] = {c["name"]: c for c in pipeline["conditionals"]}
        self.initial: str | None = pipeline["init_table"]
        self.numbers = {name: n for n, name in enumerate((*self.tables, *self.conditions), 1)}
        self.joins = self._post_dominators()

    def after(self, name: str) -> list[str | None]:
        """Return the possible successors of a node."""
        if name in self.conditions:
            node = self.conditions[name]
            return [node["true_next"], node["false_next"]]
        table = self.tables[name]
        nexts = table["next_tables"]
        if "__HIT__" in nexts or "__MISS__" in nexts:
            return [nexts.get(way, table["base_default_next"]) for way in ("__HIT__", "__MISS__")]
        return [*nexts.values(), table["base_default_next"]]

    def fits(self, max_nodes: int) -> bool:
        """Return whether nested `if`s suffice: no deep nesting, and few nodes are emitted more than once.

        A node is emitted in each branch that leads to it, unless it is where these branches meet.
        """
        stack: list[tuple[str | None, str | None, int]] = [(self.initial, None, 0)]
        count = 0
        while stack:
            node, stop, depth = stack.pop()
            while node is not None and node != stop:
                count += 1
                if count > max_nodes or depth > MAX_NESTING:
                    return False
                join = self.joins[node]
                stack.extend((n, join, depth + 2) for n in set(self.after(node)) if n != join)
                node = join
        return True

    def _post_dominators(self) -> dict[str, str | None]:
        """Return for each node the nearest one on all paths from it; visit each after its successors."""
        joins: dict[str, str | None] = {}
        depths: dict[str | None, int] = {None: 0}
        nexts = {name: [n for n in self.after(name) if n is not None] for name in self.numbers}
        for node in TopologicalSorter(nexts).static_order():
            meet, *successors = self.after(node)
            for successor in successors:
                a, b = meet, successor
                while a != b:
                    if a is not None and depths[a] >= depths[b]:
                        a = joins[a]
                    elif b is not None:
                        b = joins[b]
                meet = a
            joins[node] = meet
            depths[node] = depths[meet] + 1
        return joins


def after_action(table: Json, action: str, hit: bool) -> str | None:
    """Return the node after a table, given the action that ran and whether the table was hit."""
    nexts = table["next_tables"]
    result = "__HIT__" if hit else "__MISS__"
    way = result if "__HIT__" in nexts or "__MISS__" in nexts else action
    after: str | None = nexts.get(way, table["base_default_next"])
    return after


@dataclass(frozen=True, slots=True)
class Choice:
    """A possible action: P4Info id, JSON, and the next node."""

    id: int
    action: Json
    next: str | None


class ControlEmitter:
    """Emitter of one pipeline's control."""

    def __init__(self, emitter: Emitter, pipeline: Json) -> None:
        self.emitter = emitter
        self.pipeline = pipeline
        self.graph = Graph(pipeline)
        self.looped = not self.graph.fits(MAX_DUPLICATION * len(self.graph.numbers))

    def emit(self) -> None:
        """Emit the control; `exit` is a `break` out of it."""
        if not self._check() or self.graph.initial is None:
            return
        if self.looped:
            self._loop(self.graph.initial)
            return
        with self.emitter.block("while True:"):
            self._chain(self.graph.initial, None)
            self.emitter.line("break")

    def _check(self) -> bool:
        config = self.emitter.config
        for kind in ("action_profiles", "action_calls"):
            for item in self.pipeline.get(kind) or ():
                config.problem(f"{kind[:-1].replace('_', ' ')} {item['name']} is not supported", item)
        for table in self.graph.tables.values():
            if table["type"] != "simple":
                config.problem(f"table {table['name']} of type {table['type']} is not supported", table)
            if table.get("support_timeout"):
                config.problem(f"the idle timeout of table {table['name']} is not supported", table)
            for key in table["key"]:
                if key.get("mask") is not None:
                    config.problem(
                        f"key {key['name']} of table {table['name']}: masks are not supported", table
                    )
        return not config.problems

    def _chain(self, node: str | None, stop: str | None) -> None:
        """Emit nodes in order, up to `stop`."""
        while node is not None and node != stop:
            self._node(node)
            node = self.graph.joins[node]

    def _loop(self, initial: str) -> None:
        """Emit nodes as branches of a loop."""
        e = self.emitter
        e.line(f"_node = {self.graph.numbers[initial]}")
        with e.block("while _node:"):
            for count, name in enumerate(self.graph.numbers):
                with e.block(f"{'el' if count else ''}if _node == {self.graph.numbers[name]}:"):
                    self._node(name)

    def _follow(self, node: str, after: str | None) -> None:
        """Continue with `after`, a successor of `node`."""
        if self.looped:
            self.emitter.line(f"_node = {self.graph.numbers[after] if after else 0}")
        else:
            self._chain(after, self.graph.joins[node])

    # Nodes

    def _node(self, name: str) -> None:
        if name in self.graph.conditions:
            self._condition(name, self.graph.conditions[name])
        elif name in self.emitter.links.tables:
            self._table(name, self.graph.tables[name], self.emitter.links.tables[name])
        else:
            self._hidden(name, self.graph.tables[name])

    def _condition(self, name: str, node: Json) -> None:
        e = self.emitter
        test = e.condition(node["expression"], node).code
        e.trace("condition", source=e.text(fragment(node)), where=e.text(where(node)), result=f"bool({test})")
        with e.block(f"if {test}:"):
            self._follow(name, node["true_next"])
        if self.looped or node["false_next"] != self.graph.joins[name]:
            with e.block("else:", optional=True):
                self._follow(name, node["false_next"])

    def _hidden(self, name: str, table: Json) -> None:
        """Emit the only action of a table that p4c generated for statements."""
        action = self.emitter.config.actions[table["default_entry"]["action_id"]]
        self.emitter.trace("statements", where=self.emitter.text(where(action) or where(table)))
        self._constant_default(table, action)
        self._follow(name, after_action(table, action["name"], hit=False))

    def _table(self, name: str, json: Json, table: Table) -> None:
        """Emit a table: lookup, the entry's or the default action, and the next nodes."""
        e = self.emitter
        if not json["key"]:
            self._trace_miss(json, table)
            self._default(name, json, table)
            return
        self._lookup(json, table)
        if (
            len(
                {after_action(json, choice.action["name"], hit=True) for choice in self._choices(json, table)}
            )
            > 1
        ):
            self._switch(name, json, table)
            return
        with e.block("if entry is not None:"):
            self._hit(json, table)
            self._dispatch(name, self._choices(json, table, hit=True))
        with e.block("else:", optional=True):
            self._trace_miss(json, table)
            self._default(name, json, table)

    def _switch(self, name: str, json: Json, table: Table) -> None:
        """Emit a table whose action determines the next node; default and entries share the arms."""
        e = self.emitter
        with e.block("if entry is None:"):
            self._trace_miss(json, table)
            e.line(f"entry = {e.bind('table', table, table.name)}.default")
        with e.block("else:", optional=True):
            self._hit(json, table)
        with e.block("if entry is not None:"):
            self._dispatch(name, self._choices(json, table))
        with e.block("else:", optional=True):
            self._follow(name, json["base_default_next"])

    def _hit(self, json: Json, table: Table) -> None:
        e = self.emitter
        if json["with_counters"]:
            e.line("_count = entry.count")
            e.line("_count.packets += 1")
            e.line("_count.bytes += size")
        if json.get("direct_meters") is not None:
            emit_meter(e, json["direct_meters"], "entry.meter")
        e.trace(
            "hit",
            table=self.emitter.text(table.name),
            key=self._key_source(json, table),
            priority="entry.priority",
        )

    def _trace_miss(self, json: Json, table: Table) -> None:
        self.emitter.trace("miss", table=self.emitter.text(table.name), key=self._key_source(json, table))

    def _key_source(self, json: Json, table: Table) -> str:
        """Return the source of a packet's key as a dictionary, for the trace."""
        fields = zip(table.fields, json["key"], strict=True)
        items = (f"{self.emitter.text(field.name)}: {self._key(key['target']).code}" for field, key in fields)
        return f"{{{', '.join(items)}}}"

    def _lookup(self, json: Json, table: Table) -> None:
        """Set `entry` to the entry that the packet hits, or `None`."""
        e = self.emitter
        parts = [self._key(key["target"]).code for key in json["key"]]
        key = parts[0] if len(parts) == 1 else f"({', '.join(parts)})"
        get = e.bind("get", table.index.get, table.name)
        if table.exact:
            e.line(f"entry = {get}({key})")
            return
        e.line(f"_key = {key}")
        missing = e.bind("missing", MISSING)
        e.line(f"entry = {get}(_key, {missing})")
        with e.block(f"if entry is {missing}:"):
            e.line(f"entry = {e.bind('lookup', table.lookup, table.name)}(_key)")

    def _key(self, reference: list[str]) -> Value:
        """Return a key field's value, which is 0 if its header is invalid."""
        e = self.emitter
        header, name = reference
        value = fit(e.load(reference), e.width(reference))
        facts = e.facts
        settled = facts is not None and header not in facts.unset | facts.modified
        if header not in e.plan.layouts or name == "$valid$" or settled:
            return value
        return Value(f"{value.code} if {e.flag(header, 'valid')} else 0", value.low, value.high, "if")

    def _choices(self, json: Json, table: Table, hit: bool | None = None) -> list[Choice]:
        """Return the possible actions of an entry (`hit`), of the default, or of both (`None`)."""
        e = self.emitter
        allowed = set()
        if hit is not False:
            allowed |= table.entry_actions
        if hit is not True:
            allowed |= table.default_actions
        choices = []
        for action_id in json["action_ids"]:
            action = e.config.actions[action_id]
            p4info_id = e.links.actions[action["name"]]
            if p4info_id in allowed:
                choices.append(Choice(p4info_id, action, after_action(json, action["name"], hit is True)))
        return choices

    def _default(self, name: str, json: Json, table: Table) -> None:
        """Emit the code for a miss."""
        if table.const_default and table.initial_default is not None:
            action = self.emitter.config.actions[json["default_entry"]["action_id"]]
            self.emitter.trace(
                "action", action=self.emitter.text(action["name"]), params="{}", default="True"
            )
            self._constant_default(json, action)
            self._follow(name, after_action(json, action["name"], hit=False))
            return
        self.emitter.line(f"entry = {self.emitter.bind('table', table, table.name)}.default")
        with self.emitter.block("if entry is not None:"):
            self._dispatch(name, self._choices(json, table, hit=False))
        after = json["next_tables"].get("__MISS__", json["base_default_next"])
        if self.looped or after != self.graph.joins[name]:
            with self.emitter.block("else:", optional=True):
                self._follow(name, after)

    def _constant_default(self, json: Json, action: Json) -> None:
        self.emitter.arguments = [number(parse_hex(text)) for text in json["default_entry"]["action_data"]]
        emit_action(self.emitter, action["primitives"], action)

    def _dispatch(self, name: str, choices: list[Choice]) -> None:
        """Emit the action of `entry`, and the nodes after it."""
        e = self.emitter
        nexts = {choice.next for choice in choices}
        together = len(nexts) == 1
        if len(choices) == 1:
            self._run(name, choices[0], together)
        elif any(c.action["primitives"] or not together for c in choices) or e.traced:
            e.line("_action = entry.action")
            keyword = "if"
            for choice in choices:
                with e.block(f"{keyword} _action == {choice.id}:"):
                    self._run(name, choice, together)
                keyword = "elif"
        if together:
            self._follow(name, nexts.pop())

    def _run(self, name: str, choice: Choice, together: bool) -> None:
        """Emit one action, with the nodes after it unless they are the same for all actions."""
        e = self.emitter
        names = [e.plan.names.identifier("arg", str(n)) for n in range(len(choice.action["runtime_data"]))]
        parameters = zip(names, choice.action["runtime_data"], strict=True)
        e.arguments = [variable(n, p["bitwidth"]) for n, p in parameters]
        if names and choice.action["primitives"]:
            e.line(f"{', '.join(names)}, = entry.params")
        keys = e.bind("names", [p["name"] for p in choice.action["runtime_data"]], choice.action["name"])
        params = f"dict(zip({keys}, entry.params))"
        e.trace("action", action=e.text(choice.action["name"]), params=params, default="entry.is_default")
        emit_action(e, choice.action["primitives"], choice.action)
        if not together:
            self._follow(name, choice.next)
