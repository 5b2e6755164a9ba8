"""Which pages each request has: prefix match, growth, sharing with the prefix tree, release, the books."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tokenspeed.cache.pages import PagePool
from tokenspeed.cache.radix import TOKEN_BYTES, Node, RadixTree


class CacheGroup(Protocol):
    """Layers that keep the past in the same way. All groups share the pages and the prefix tree."""

    def resumable(self, ids: bytes, num_pages: int) -> int:
        """The longest prefix of `ids`, in pages and at most `num_pages`, after which these layers can go on,
        given that the tree has the pages of all of it."""
        ...


class FullAttention:
    """Layers whose past is exactly the K/V in the pages: they can go on after any of them."""

    def resumable(self, ids: bytes, num_pages: int) -> int:
        return num_pages


class Match(NamedTuple):
    """A prefix found in the tree. Good for `allocate` until the manager is next called for anything else."""

    node: Node
    pages: list[int]


class RequestPages:
    """The block table of one request, and its lock in the prefix tree.

    Region map, in tokens; K/V is committed for [0, computed):

        0 ........ cached ........ shared ........ computed ........ len(pages) * page_size
        | matched  | own, also in  | own, committed | own, being written or reserved |
        | (tree's) | the tree      |                |                                |

    The pages left of `shared` (`node` is the last of them) are locked in the tree. Between `cached` and
    `shared` the tree may have other pages than this request for the same tokens, when two requests computed
    them at once: then this request goes on with its own, which are freed with it.
    """

    __slots__ = ("node", "num_cached", "num_shared", "pages")

    def __init__(self, node: Node, pages: list[int], num_cached: int):
        self.node = node
        self.pages = pages
        self.num_cached = num_cached  # tokens
        self.num_shared = len(pages)  # pages


class CacheManager:
    """Pages are free, cached (in the tree and in no use) or used; the sum of the three is constant."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        enable_prefix_caching: bool = True,
        groups: Sequence[CacheGroup] = (FullAttention(),),
    ):
        """num_pages: with the dummy page. page_size: tokens."""
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(page_size)
        self._groups = groups
        self._held: set[RequestPages] = set()

    @property
    def num_total(self) -> int:
        return self.pool.num_total

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def num_cached(self) -> int:
        """Pages that the tree keeps for later and would give up."""
        return self.tree.num_evictable

    @property
    def num_available(self) -> int:
        return self.pool.num_free + self.tree.num_evictable

    @property
    def num_used(self) -> int:
        return self.num_total - self.num_available

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def match(self, ids: bytes) -> tuple[int, Match]:
        """The longest cached prefix of `ids` (int32 bytes) that leaves a token to compute and that every
        group can serve: its number of tokens, a multiple of the page size, and what `allocate` wants."""
        if not self.enable_prefix_caching:
            return self.no_match()
        limit = (len(ids) // TOKEN_BYTES - 1) // self.page_size
        node, pages = self.tree.match(ids, limit)
        while (served := min(group.resumable(ids, len(pages)) for group in self._groups)) < len(pages):
            node, pages = self.tree.match(ids, served)
        return len(pages) * self.page_size, Match(node, pages)

    def no_match(self) -> tuple[int, Match]:
        """For a request that must compute its whole prompt."""
        return 0, Match(self.tree.root, [])

    def allocate(self, match: Match) -> RequestPages:
        """A block table that begins with the matched pages, which it locks. Never fails."""
        self.tree.lock(match.node)
        self.pool.share(match.pages)
        held = RequestPages(match.node, list(match.pages), len(match.pages) * self.page_size)
        self._held.add(held)
        return held

    def append(self, held: RequestPages, num_tokens: int) -> list[int] | None:
        """Grows the table to hold `num_tokens` tokens, evicting what it must.

        Returns the new pages, in order (none when they were enough), or None when there is no room; then
        nothing has changed.
        """
        count = self.num_pages_for(num_tokens) - len(held.pages)
        if count <= 0:
            return []
        short = count - self.pool.num_free
        if short > self.tree.num_evictable:
            return None
        if short > 0:
            self.pool.drop(self.tree.evict(short))
        pages = self.pool.take(count)
        held.pages += pages
        return pages

    def insert(self, held: RequestPages, ids: bytes) -> None:
        """Shares with the tree the whole pages of `ids`, whose K/V is committed; the request goes on using
        them.

        Where the tree has these tokens already, it keeps its pages and the request its own. `ids` begins with
        what the request has shared before; when it is no longer than that, nothing happens.
        """
        count = len(ids) // self.tree.page_bytes
        if not self.enable_prefix_caching or count <= held.num_shared:
            return
        node, taken = self.tree.insert(ids, held.pages[:count])
        self.pool.share(taken)
        self.tree.lock(node)
        self.tree.unlock(held.node)
        held.node, held.num_shared = node, count

    def release(self, held: RequestPages, ids: bytes = b"") -> None:
        """Ends the request's hold; the whole pages of `ids`, whose K/V is committed, stay in the tree, the
        rest is freed unless another holds it.

        Ownership: a step in flight may still write for this request, at indices from its number of committed
        tokens - 1 on. Those lie right of every whole page of `ids` (the caller leaves out the last sampled
        token, which has no K/V), so the tree never gets a page that is still being written. The freed ones
        may be written once more before another request writes them, since the worker runs steps in order.
        """
        if ids:
            self.insert(held, ids)
        self._held.remove(held)
        self.tree.unlock(held.node)
        self.pool.drop(held.pages)

    def check(self) -> None:
        """Raises AssertionError unless every page is accounted for exactly once. Costs time in proportion to
        the pool."""
        self.pool.check()
        self.tree.check()
        refs = [0] * self.pool.num_pages
        for node in self.tree.nodes():
            for page in node.pages:
                refs[page] += 1
        cached = {page for node in self.tree.nodes() if node.locks == 0 for page in node.pages}
        locks: dict[Node, int] = {}
        for held in self._held:
            assert len(set(held.pages)) == len(held.pages), "a request has a page twice"
            assert cached.isdisjoint(held.pages), "a request uses pages that the tree may evict"
            for page in held.pages:
                refs[page] += 1
            step: Node | None = held.node
            while step is not None:
                locks[step] = locks.get(step, 0) + 1
                step = step.parent
        assert refs == self.pool.refs, "a page's references differ from its holders"
        for node in self.tree.nodes():
            assert node.locks == locks.get(node, 0), f"{node.locks} locks, {locks.get(node, 0)} holders"
        used = sum(1 for page, count in enumerate(refs) if count and page not in cached)
        assert self.num_free + self.num_cached + used == self.num_total, (
            "free + cached + used is not the total"
        )
        assert len(cached) == self.num_cached and used == self.num_used
