"""A step's graph in pieces: what comes before the layers, a layer, and what comes after them.

The insight: layers differ in what they read, not in what they compute. torch traces the whole step, and finds that a marked
function comes to the same graph in every layer; so this one is compiled once, and called with each layer's tensors in turn.
Where every layer has another number of slots (PyramidKV), none is called twice, and torch leaves the graph whole.
"""

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from .model import Attend, Block

Run = Callable[..., Sequence[Tensor]]
KINDS = 1024  # layers that differ, in how many slots they have: so many at most


def through(block: Block, x: Tensor, layer: int, attend: Attend) -> Tensor:
    """x [S, dim] behind a layer. Not in place: a region may not answer with what it was given."""
    return block(x.clone(), layer, attend)


def marked() -> Callable | None:
    """`through`, marked as a region to be compiled once. None where torch cannot: before 2.13 or so."""
    mark = getattr(torch.compiler, "nested_compile_region", None)
    if mark is None or "max_reuse_entries" not in inspect.signature(mark).parameters:
        return None
    return mark(through, max_reuse_entries=KINDS)


def unfit(error: Exception) -> bool:
    """Did tracing fail because a marked function cannot be a region? It may not look at one tensor in two ways (`k` and `k.mT`), for one."""
    return type(error).__name__ == "UncapturedHigherOrderOpError"


def regions(graph: fx.GraphModule) -> list[fx.Node]:
    """The calls of marked functions in a graph that torch traced."""
    return [node for node in graph.graph.nodes if node.op == "call_function" and str(node.target) == "invoke_subgraph"]


class Pieces:
    """A graph whose regions are compiled once each, as a list of calls; given what the graph is given, it answers what the graph does."""

    def __init__(self, graph: fx.GraphModule, build: Callable[[fx.GraphModule, Sequence[Tensor]], Run]):
        self._places: dict[fx.Node, int] = {}  # a node's among the values of a step
        self._calls: list[tuple[Run, list[int], list[int]]] = []  # what is called, of which values, and where its answers go
        built: dict[str, Run] = {}
        between: list[fx.Node] = []
        calls, nodes = set(regions(graph)), list(graph.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                self._place(node)
            elif node in calls:
                self._inline(graph, between, build)
                inside, name, *given = node.args
                if name not in built:
                    built[name] = build(graph.get_submodule(inside.target), [g.meta["example_value"] for g in given])
                answers = sorted(node.users, key=lambda user: user.args[1])  # it answers with a tuple, of which users pick
                assert [user.args[1] for user in answers] == list(range(len(answers))), "every answer of a region is used"
                self._calls.append((built[name], [self._places[g] for g in given], [self._place(user) for user in answers]))
            elif node.op not in ("get_attr", "output") and node not in self._places:
                between.append(node)
        self._inline(graph, between, build)
        self._answers = [self._places[node] for node in nodes[-1].args[0]]

    def _place(self, node: fx.Node) -> int:
        return self._places.setdefault(node, len(self._places))

    def _inline(self, graph: fx.GraphModule, nodes: list[fx.Node], build: Callable) -> None:
        """Nodes between two regions, as a graph of their own."""
        if not nodes:
            return
        own, copies = fx.Graph(), {}
        given = list(dict.fromkeys(g for node in nodes for g in node.all_input_nodes if g not in set(nodes)))
        answers = [node for node in nodes if not set(node.users) <= set(nodes)]
        for g in given:
            copies[g] = own.placeholder(g.name)
        for node in nodes:
            copies[node] = own.node_copy(node, copies.__getitem__)
        own.output(tuple(copies[node] for node in answers))
        run = build(fx.GraphModule(graph, own), [g.meta["example_value"] for g in given])
        self._calls.append((run, [self._places[g] for g in given], [self._place(node) for node in answers]))
        nodes.clear()

    def __call__(self, *given: Tensor) -> list[Tensor]:
        values = [*given, *[None] * (len(self._places) - len(given))]
        for run, takes, puts in self._calls:
            for place, answer in zip(puts, run(*[values[i] for i in takes])):
                values[place] = answer
        return [values[i] for i in self._answers]
