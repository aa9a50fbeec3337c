"""The graph of a control's tables and conditions: successors, and the nodes where branches meet again."""

from __future__ import annotations

from graphlib import TopologicalSorter

from softswitch.program.bmv2 import Json

MAX_NESTING = 40


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
