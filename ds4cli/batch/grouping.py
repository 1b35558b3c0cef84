"""Which prompts to answer one after the other, and where to leave checkpoints. Pure: token ids in.

Moving a session from one prompt to the next costs what they do not have in common. In any
depth-first order of the prompts' trie every shared prefix is read once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ds4cli.tokens import common_prefix

# A checkpoint costs one more model call; it has to save at least this many tokens.
WORTHWHILE_TOKENS = 16


@dataclass
class _Node:
    """A run of tokens that all prompts below share; `ends`: the prompts that end with it."""

    span: Sequence[int]
    ends: list[int] = field(default_factory=list)
    children: dict[int, _Node] = field(default_factory=dict)

    def split(self, at: int) -> None:
        """Keep the first `at` tokens; everything else moves to one child."""
        below = _Node(self.span[at:], self.ends, self.children)
        self.span, self.ends, self.children = self.span[:at], [], {below.span[0]: below}


def trie_order(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Indices of `prompts`, depth first through their trie, in order of first appearance."""
    root = _Node(())
    for index, prompt in enumerate(prompts):
        _insert(root, prompt, index)
    return list(_walk(root))


def _insert(node: _Node, tokens: Sequence[int], index: int) -> None:
    while len(tokens):
        child = node.children.get(tokens[0])
        if child is None:
            child = node.children[tokens[0]] = _Node(tokens)
        same = common_prefix(child.span, tokens)
        if same < len(child.span):
            child.split(same)
        node, tokens = child, tokens[same:]
    node.ends.append(index)


def _walk(root: _Node) -> Iterator[int]:
    stack = [root]
    while stack:
        node = stack.pop()
        yield from node.ends
        stack.extend(reversed(node.children.values()))


def shared_lengths(prompts: Sequence[Sequence[int]], before: Sequence[int]) -> list[int]:
    """For each prompt how many tokens it shares with the previous one; `before` is the first's."""
    previous = [before, *prompts][: len(prompts)]
    return [common_prefix(p, q) for p, q in zip(previous, prompts, strict=True)]


def branch_points(shared: Sequence[int], index: int) -> list[int]:
    """Positions in prompt `index` where later prompts branch off, those worth a checkpoint.

    shared: what each prompt shares with the previous one. The place where this prompt itself
    branched off counts once: others that are not known yet often do the same.
    """
    uses = Counter({shared[index]: 1})
    lowest = None
    for length in shared[index + 1 :]:
        if lowest is None or length <= lowest:
            lowest = length
            uses[length] += 1
        if lowest == 0:
            break
    kept, below = [], 0
    for pos in sorted(uses):
        if uses[pos] * (pos - below) >= WORTHWHILE_TOKENS:
            kept.append(pos)
            below = pos
    return kept
