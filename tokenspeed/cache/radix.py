"""The prefix tree: which pages hold the K/V of which token ids, shared, locked and evicted by last use.

Token ids are int32 bytes, as they travel in messages, so that comparing runs of them is a memcmp.
"""

import heapq
import itertools
from collections.abc import Iterator

TOKEN_BYTES = 4


class Node:
    """A run of whole pages. Its children begin with different first pages."""

    __slots__ = ("children", "key", "last_used", "locks", "pages", "parent", "queued")

    def __init__(self, key: bytes, pages: list[int], parent: "Node | None", last_used: int, locks: int = 0):
        self.key = key  # token ids of the pages
        self.pages = pages
        self.parent = parent  # None: the root, which has no pages
        self.children: dict[bytes, Node] = {}  # by the token ids of the child's first page
        self.locks = locks  # holders of this node or of one below it
        self.last_used = last_used
        self.queued = False  # has an entry in the eviction heap


class RadixTree:
    """Knows pages by number only; references to them are the caller's business.

    A locked node's ancestors are locked too, so whatever is unlocked can be evicted, leaves first.
    """

    def __init__(self, page_size: int):
        self.page_bytes = page_size * TOKEN_BYTES
        self.root = Node(b"", [], None, 0, locks=1)
        self.num_pages = 0
        self.num_evictable = 0  # pages in unlocked nodes
        self._clock = 0
        self._serial = itertools.count()
        self._heap: list[tuple[int, int, Node]] = []  # (last_used, tie, node), at most one entry a node

    def match(self, ids: bytes, max_pages: int) -> tuple[Node, list[int]]:
        """The longest prefix of `ids` in the tree, at most `max_pages` whole pages.

        Returns its last node and its pages. Splits a node when the match ends inside it; changes nothing
        else. Neither is protected from eviction until `lock`.
        """
        node, pages, size = self.root, [], self.page_bytes
        while len(pages) < max_pages:
            at = len(pages)
            child = node.children.get(ids[at * size : (at + 1) * size])
            if child is None:
                break
            common = self._common(child, ids, at, min(len(child.pages), max_pages - at))
            node = child if common == len(child.pages) else self._split(child, common)
            pages += node.pages
        return node, pages

    def lock(self, node: Node) -> None:
        """Keeps the node and everything above it until `unlock`."""
        self._clock += 1
        step: Node | None = node
        while step is not None:
            if step.locks == 0:
                self.num_evictable -= len(step.pages)
            step.locks += 1
            step.last_used = self._clock
            step = step.parent

    def unlock(self, node: Node) -> None:
        self._clock += 1
        step: Node | None = node
        while step is not None:
            assert step.locks > 0, "unlock without lock"
            step.locks -= 1
            step.last_used = self._clock
            if step.locks == 0:
                self.num_evictable += len(step.pages)
            step = step.parent
        self._offer(node)

    def insert(self, ids: bytes, pages: list[int]) -> tuple[Node, list[int]]:
        """Makes the tree hold `ids`, whose K/V lies in `pages`.

        Returns the node that ends the run, and the pages that the tree has taken: a tail of `pages`. What
        came before that tail was already there, in pages of the tree's own.
        """
        node, have = self.match(ids, len(pages))
        taken = pages[len(have) :]
        if taken:
            size = self.page_bytes
            self._clock += 1
            key = ids[len(have) * size : len(pages) * size]
            leaf = Node(key, taken, node, self._clock)
            node.children[key[:size]] = leaf
            self.num_pages += len(taken)
            self.num_evictable += len(taken)
            node = leaf
            self._offer(leaf)
        return node, taken

    def evict(self, count: int) -> list[int]:
        """Forgets up to `count` unlocked pages, the least recently used leaves first, each from its end."""
        gone: list[int] = []
        while len(gone) < count and self._heap:
            used, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.locks or node.children:
                continue  # offered again when that changes
            if node.last_used != used:
                self._offer(node)
                continue
            keep = max(0, len(node.pages) - (count - len(gone)))
            gone += node.pages[keep:]
            if keep:
                node.key, node.pages = node.key[: keep * self.page_bytes], node.pages[:keep]
                self._offer(node)
            else:
                assert node.parent is not None
                del node.parent.children[node.key[: self.page_bytes]]
                self._offer(node.parent)
        self.num_pages -= len(gone)
        self.num_evictable -= len(gone)
        return gone

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def check(self) -> None:
        """Raises AssertionError when the tree's own books are wrong."""
        held = [page for node in self.nodes() for page in node.pages]
        assert len(set(held)) == len(held) == self.num_pages, (
            "a page is in the tree twice, or the count is wrong"
        )
        unlocked = sum(len(node.pages) for node in self.nodes() if node.locks == 0)
        assert unlocked == self.num_evictable, (
            f"{unlocked} pages are evictable, {self.num_evictable} are booked"
        )
        queued = {id(node) for _, _, node in self._heap}
        for node in self.nodes():
            size, parent = self.page_bytes, node.parent
            assert node.pages and len(node.key) == len(node.pages) * size, (
                "a run and its pages differ in length"
            )
            assert parent is not None and parent.children[node.key[:size]] is node, (
                "a child under a wrong key"
            )
            assert node.locks == 0 or parent.locks >= node.locks, "a locked node under an unlocked one"
            assert node.queued == (id(node) in queued), "a node's mark and the eviction heap disagree"
            assert node.locks or node.children or node.queued, (
                "an evictable leaf that eviction would never find"
            )

    def _common(self, node: Node, ids: bytes, at: int, limit: int) -> int:
        """Pages of the node that equal `ids` from page `at` on; the first is known to be equal."""
        size = self.page_bytes
        ids = ids[at * size : (at + limit) * size]
        if node.key[: limit * size] == ids:
            return limit
        low, high = 1, limit  # `low` pages are equal, `high` pages are not
        while high - low > 1:
            middle = (low + high) // 2
            if node.key[low * size : middle * size] == ids[low * size : middle * size]:
                low = middle
            else:
                high = middle
        return low

    def _split(self, node: Node, count: int) -> Node:
        """Puts the first `count` pages into a new parent. The node keeps its identity, so locks held on it
        stay right."""
        size, parent = self.page_bytes, node.parent
        assert parent is not None
        upper = Node(node.key[: count * size], node.pages[:count], parent, node.last_used, node.locks)
        node.key, node.pages, node.parent = node.key[count * size :], node.pages[count:], upper
        upper.children[node.key[:size]] = node
        parent.children[upper.key[:size]] = upper
        return upper

    def _offer(self, node: Node) -> None:
        """Queues a node for eviction if it is an unlocked leaf. The root is always locked."""
        if not (node.locks or node.children or node.queued):
            node.queued = True
            heapq.heappush(self._heap, (node.last_used, next(self._serial), node))
