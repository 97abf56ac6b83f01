"""Settled blocks by the tokens in them and all tokens before them: one tree for each salt.

block_size 4, two sequences of one salt:

    root ─┬─ [a b c d] block 7 ─┬─ [e f g h] block 2 ── [i j| block 9
          │                     └─ [x y| block 4
          └─ [k l m n] block 0

A full block is found by its tokens and shared: nobody writes it any more. The last block of a
sequence, a tail, has one owner at most; others may copy its first tokens. A block that spans the
whole context is always a tail. Nodes that nobody holds are idle: they stay until a live sequence
needs their memory, the one that was dropped longest ago first.

Tokens are compared themselves, never a digest of them. Positions whose tokens may yet be rejected
do not come here.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field

from cluster.prefixes import Chain

MIN_COPIED_TOKENS = 8  # below that, computing the rows is about as quick as copying them


@dataclass(eq=False, slots=True)
class Branch:
    """What follows the same tokens: full blocks by theirs, and tails."""

    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    tails: list["Node"] = field(default_factory=list)

    @property
    def is_leaf(self) -> bool:
        """Whether nothing follows."""
        return not self.children and not self.tails

    def nodes(self) -> Iterator["Node"]:
        """All that follows directly."""
        yield from self.children.values()
        yield from self.tails


@dataclass(eq=False, slots=True, kw_only=True)
class Node(Branch):
    """A block whose first `len(token_ids)` positions are settled; `holders` sequences use it."""

    salt: str
    parent: Branch
    block: int
    token_ids: list[int] = field(default_factory=list)
    holders: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """The longest settled prefix: shared full blocks, then the first `num_tail` of a `tail`."""

    path: tuple[Node, ...] = ()
    tail: Node | None = None
    num_tail: int = 0

    @property
    def adopts(self) -> bool:
        """Whether the tail can be taken over: it is idle, and all of it is wanted."""
        tail = self.tail
        return tail is not None and tail.holders == 0 and self.num_tail == len(tail.token_ids)


class PrefixCache:
    """The trees, who holds what in them, and the idle nodes in the order of eviction."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._roots: dict[str, Branch] = {}
        self._idle: dict[Node, None] = {}  # first dropped, first evicted; children before parents

    @property
    def num_idle(self) -> int:
        """Blocks that are only kept in case somebody wants their tokens."""
        return len(self._idle)

    def find(self, salt: str, token_ids: list[int], limit: int) -> Match:
        """The longest prefix of `token_ids` that is settled, at most `limit` tokens of it."""
        branch = self._roots.get(salt)
        if branch is None or limit <= 0:
            return Match()
        path: list[Node] = []
        start = 0
        while start + self._block_size <= limit:
            child = branch.children.get(tuple(token_ids[start : start + self._block_size]))
            if child is None:
                break
            path.append(child)
            branch = child
            start += self._block_size
        wanted = token_ids[start : min(start + self._block_size, limit)]
        matches = [Match(tuple(path))]
        for node in branch.nodes():
            match = Match(tuple(path), node, common_length(node.token_ids, wanted))
            if match.num_tail >= MIN_COPIED_TOKENS or (match.num_tail and match.adopts):
                matches.append(match)
        return max(matches, key=lambda match: (match.num_tail, match.adopts))

    def digests(self, most: int) -> frozenset[int]:
        """Digests of the prefixes that are here, as of `cluster.prefixes`.

        Those that stand nearest to a root come first, being the likeliest to be asked for; when
        there are `most` no further block is looked at.
        """
        found: set[int] = set()
        branches = deque((Chain(salt), root) for salt, root in self._roots.items())
        while branches and len(found) < most:
            chain, branch = branches.popleft()
            for node in branch.nodes():
                longer = copy(chain)
                found.update(longer.extend(node.token_ids))
                branches.append((longer, node))
        return frozenset(found)

    def hold(self, node: Node) -> None:
        """Have one more sequence use the node."""
        node.holders += 1
        self._idle.pop(node, None)

    def touch(self, node: Node) -> None:
        """Have an idle node be evicted last. Its parent must be held, or be a root."""
        if node in self._idle:
            self._idle[node] = self._idle.pop(node)

    def drop(self, path: Sequence[Node]) -> list[int]:
        """Have one sequence less use the nodes of a path from its root.

        Returns the blocks that are of no more use, since another's tokens begin with all of theirs.
        """
        freed: list[int] = []
        for node in reversed(path):
            node.holders -= 1
            if node.holders == 0:
                freed += self._drop_last(node)
        return freed

    def open_tail(self, salt: str, parent: Node | None, block: int) -> Node:
        """A node without tokens, held by one sequence; without a parent it stands at the root."""
        branch = self._roots.setdefault(salt, Branch()) if parent is None else parent
        node = Node(salt=salt, parent=branch, block=block, holders=1)
        branch.tails.append(node)
        return node

    def close_tail(self, node: Node) -> Node:
        """Make a tail that has become full one that is shared; returns the node to hold now.

        That is another one when it has the same tokens: the tail is forgotten, its block free.
        """
        node.parent.tails.remove(node)
        twin = node.parent.children.setdefault(tuple(node.token_ids), node)
        if twin is not node:
            self.hold(twin)
        return twin

    def evict(self) -> int:
        """Forget the node that was dropped longest ago; returns its block. There must be one."""
        node = next(iter(self._idle))
        assert node.is_leaf, "a node outlives what follows it"
        self._forget(node)
        return node.block

    def _drop_last(self, node: Node) -> list[int]:
        """Nobody holds the node any more: keep it, unless that is of no use."""
        self._idle[node] = None
        if len(node.token_ids) == self._block_size:
            return []
        others = [other for other in node.parent.nodes() if other is not node]
        if any(_begins_with(other, node) for other in others):
            covered = [node]
        else:
            covered = [
                other for other in others if other.holders == 0 and _begins_with(node, other)
            ]
        for redundant in covered:
            self._forget(redundant)
        return [redundant.block for redundant in covered]

    def _forget(self, node: Node) -> None:
        """Take an idle node out of its tree, and the tree away if it was the last."""
        del self._idle[node]
        if len(node.token_ids) == self._block_size:
            del node.parent.children[tuple(node.token_ids)]
        else:
            node.parent.tails.remove(node)
        root = self._roots[node.salt]
        if root.is_leaf:
            del self._roots[node.salt]


def common_length(left: list[int], right: list[int]) -> int:
    """How many first tokens are equal."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _begins_with(node: Node, prefix: Node) -> bool:
    length = len(prefix.token_ids)
    return node.token_ids[:length] == prefix.token_ids
