"""Pages, prefix tree and manager: single cases, and random walks against a naive model."""

import random

import pytest

from tokenspeed.cache.manager import CacheManager
from tokenspeed.cache.pages import PagePool
from tokenspeed.cache.radix import RadixTree
from tokenspeed.ipc.messages import pack


def filled(cache: CacheManager, tokens: list[int]) -> None:
    """A request that computed `tokens` and is gone."""
    held = cache.allocate(cache.match(pack(tokens))[1])
    assert cache.append(held, len(tokens)) is not None
    cache.release(held, pack(tokens))


def test_pool_hands_out_every_page_but_the_dummy():
    pool = PagePool(5)
    pages = pool.take(4)
    assert sorted(pages) == [1, 2, 3, 4] and pool.num_free == 0
    with pytest.raises(AssertionError):
        pool.take(1)
    pool.share(pages[:1])
    pool.drop(pages)
    assert pool.num_free == 3
    pool.drop(pages[:1])
    assert pool.num_free == 4
    with pytest.raises(AssertionError):
        pool.drop(pages[:1])
    with pytest.raises(AssertionError):
        pool.share([2])
    assert pool.take(0) == []
    pool.check()


def test_pool_check_finds_a_lost_page():
    pool = PagePool(4)
    pool.take(1)
    pool.refs[pool._free[-1]] = 1
    with pytest.raises(AssertionError):
        pool.check()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 12, 13])
def test_match_leaves_a_token(length):
    cache = CacheManager(num_pages=20, page_size=4)
    filled(cache, list(range(12)))
    num_cached, _ = cache.match(pack(range(length)))
    assert num_cached == (length - 1) // 4 * 4
    cache.check()


def test_match_inside_a_run_splits_it_and_locks_only_what_is_used():
    cache = CacheManager(num_pages=20, page_size=2)
    filled(cache, list(range(12)))
    held = cache.allocate(cache.match(pack([0, 1, 2, 3, 99, 98, 97]))[1])
    assert held.num_cached == 4 and cache.num_used == 2 and cache.num_cached == 4
    cache.check()
    cache.append(held, 7)
    cache.release(held, pack([0, 1, 2, 3, 99, 98]))
    assert cache.match(pack([0, 1, 2, 3, 99, 98, 97]))[0] == 6
    assert cache.match(pack(range(13)))[0] == 12
    assert cache.num_cached == 7 and cache.num_used == 0
    cache.check()


def test_duplicates_are_freed():
    cache = CacheManager(num_pages=20, page_size=2)
    both = [cache.allocate(cache.match(pack([1, 2, 3, 4, 5]))[1]) for _ in range(2)]
    for held in both:
        cache.append(held, 5)
    assert cache.num_used == 6
    cache.release(both[0], pack([1, 2, 3, 4]))
    cache.release(both[1], pack([1, 2, 3, 4]))
    assert (cache.num_cached, cache.num_free) == (2, 17)
    cache.check()


def test_duplicates_of_a_request_that_goes_on():
    """The second of two equal prompts keeps its own pages, and the tree grows on the first one's."""
    cache = CacheManager(num_pages=20, page_size=2)
    first, second = (cache.allocate(cache.match(pack([1, 2, 3, 4, 5]))[1]) for _ in range(2))
    for held in (first, second):
        cache.append(held, 5)
        cache.insert(held, pack([1, 2, 3, 4, 5]))
        cache.check()
    assert not set(first.pages) & set(second.pages)
    cache.append(second, 8)
    cache.release(first, pack([1, 2, 3, 4]))
    cache.check()
    own = second.pages[2]
    cache.release(second, pack([1, 2, 3, 4, 5, 6, 7]))
    cache.check()
    held = cache.allocate(cache.match(pack(range(1, 9)))[1])
    assert held.pages == [*first.pages[:2], own]


def test_partial_pages_are_never_shared():
    cache = CacheManager(num_pages=20, page_size=4)
    filled(cache, list(range(11)))
    assert cache.num_cached == 2 and cache.num_free == 17
    assert cache.match(pack(range(11)))[0] == 8


def test_eviction_takes_the_least_recently_used_end_first():
    cache = CacheManager(num_pages=1 + 9, page_size=1)
    for start in (10, 20, 30):
        filled(cache, [start, start + 1, start + 2])
    held = cache.allocate(cache.match(pack([10, 11, 12, 0]))[1])  # used again
    cache.release(held)
    taker = cache.allocate(cache.no_match()[1])
    assert len(cache.append(taker, 2)) == 2
    assert cache.match(pack([20, 21, 22, 0]))[0] == 1
    assert cache.match(pack([10, 11, 12, 0]))[0] == 3 and cache.match(pack([30, 31, 32, 0]))[0] == 3
    assert len(cache.append(taker, 6)) == 4
    assert [cache.match(pack([s, s + 1, s + 2, 0]))[0] for s in (10, 20, 30)] == [3, 0, 0]
    cache.check()
    cache.release(taker)


def test_locked_pages_are_never_evicted_and_a_refusal_changes_nothing():
    cache = CacheManager(num_pages=1 + 6, page_size=1)
    filled(cache, [1, 2, 3, 4])
    held = cache.allocate(cache.match(pack([1, 2, 3, 9]))[1])
    taker = cache.allocate(cache.no_match()[1])
    assert cache.num_available == 3
    assert cache.append(taker, 4) is None
    assert cache.num_available == 3 and cache.match(pack([1, 2, 3, 4, 9]))[0] == 4
    assert len(cache.append(taker, 3)) == 3
    assert cache.match(pack([1, 2, 3, 4, 9]))[0] == 3
    cache.check()
    cache.release(held)
    cache.release(taker)
    assert cache.num_used == 0
    cache.check()


def test_append_counts_tokens_not_pages():
    cache = CacheManager(num_pages=10, page_size=4)
    held = cache.allocate(cache.no_match()[1])
    assert len(cache.append(held, 4)) == 1
    assert cache.append(held, 4) == [] and cache.append(held, 1) == []
    assert len(cache.append(held, 5)) == 1 and len(held.pages) == 2


def test_without_prefix_caching_nothing_is_kept():
    cache = CacheManager(num_pages=10, page_size=2, enable_prefix_caching=False)
    filled(cache, list(range(8)))
    assert cache.num_free == 9 and cache.match(pack(range(8)))[0] == 0
    cache.check()


def test_a_match_is_what_every_group_can_serve():
    class EveryThird:
        """As a recurrent state that is kept for every third page only."""

        def resumable(self, ids: bytes, num_pages: int) -> int:
            return num_pages // 3 * 3

    class AtMost:
        def resumable(self, ids: bytes, num_pages: int) -> int:
            return min(num_pages, 4)

    cache = CacheManager(num_pages=20, page_size=2, groups=(EveryThird(), AtMost()))
    filled(cache, list(range(16)))
    num_cached, match = cache.match(pack(range(17)))
    assert num_cached == 3 * 2 and len(match.pages) == 3
    held = cache.allocate(match)
    assert cache.num_used == 3
    cache.check()
    cache.release(held)


def test_check_finds_wrong_books():
    def fresh() -> CacheManager:
        cache = CacheManager(num_pages=20, page_size=2)
        filled(cache, list(range(8)))
        cache.allocate(cache.match(pack(range(6)))[1])
        cache.check()
        return cache

    def leak(cache):
        cache.pool.take(1)

    def forget_holder(cache):
        cache._held.clear()

    def evict_without_drop(cache):
        cache.tree.evict(1)

    def free_a_held_page(cache):
        cache.pool.drop(next(iter(cache._held)).pages[:1])

    def unlock(cache):
        cache.tree.unlock(next(iter(cache._held)).node)

    for damage in (leak, forget_holder, evict_without_drop, free_a_held_page, unlock):
        cache = fresh()
        damage(cache)
        with pytest.raises(AssertionError):
            cache.check()


class NaiveTree:
    """Every cached prefix as a tuple of tokens, with its page and last use."""

    def __init__(self, size: int):
        self.size, self.page = size, {}

    def match(self, tokens: list[int], max_pages: int) -> list[int]:
        pages = []
        while len(pages) < max_pages:
            page = self.page.get(tuple(tokens[: (len(pages) + 1) * self.size]))
            if page is None or len(tokens) < (len(pages) + 1) * self.size:
                break
            pages.append(page)
        return pages

    def insert(self, tokens: list[int], pages: list[int]) -> list[int]:
        taken = []
        for i, page in enumerate(pages):
            key = tuple(tokens[: (i + 1) * self.size])
            if key not in self.page:
                self.page[key] = page
                taken.append(page)
        return taken

    def evict(self, pages: list[int]) -> None:
        """Checks that each page was a leaf when it went."""
        gone = set(pages)
        dead = {key for key, page in self.page.items() if page in gone}
        assert len(dead) == len(gone) == len(pages)
        for key in self.page.keys() - dead:
            assert all(key[: len(other)] != other for other in dead), "a page went before one that needs it"
        for key in dead:
            del self.page[key]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_tree_against_a_naive_model(size, seed):
    rng = random.Random(seed)
    tree, naive = RadixTree(size), NaiveTree(size)
    fresh = iter(range(1, 10**6))
    locked: list = []
    for _ in range(1500):
        tokens = [rng.randrange(3) for _ in range(rng.randint(0, 12) * size + rng.randrange(size))]
        whole = len(tokens) // size
        dice = rng.random()
        if dice < 0.4:
            pages = [next(fresh) for _ in range(whole)]
            _, taken = tree.insert(pack(tokens), pages)
            assert taken == naive.insert(tokens, pages)
        elif dice < 0.7:
            limit = rng.randint(0, 13)
            node, pages = tree.match(pack(tokens), limit)
            assert pages == naive.match(tokens, limit)
            if rng.random() < 0.3 and len(locked) < 6:
                tree.lock(node)
                locked.append((node, pages))
        elif dice < 0.8 and locked:
            node, _ = locked.pop(rng.randrange(len(locked)))
            tree.unlock(node)
        elif dice < 0.95:
            gone = tree.evict(rng.randint(0, 6))
            naive.evict(gone)
            assert not any(set(gone) & set(pages) for _, pages in locked), "a locked page was evicted"
        else:
            before = tree.num_evictable
            gone = tree.evict(10**6)
            assert len(gone) == before and tree.num_evictable == 0
            naive.evict(gone)
        tree.check()
        assert tree.num_pages == len(naive.page)


@pytest.mark.parametrize("seed", range(3))
def test_manager_random_walk(seed):
    """Requests that come, grow and go; the books are right after each event and all pages come back."""
    rng = random.Random(seed)
    cache = CacheManager(num_pages=1 + 40, page_size=3)
    running: list[tuple] = []
    for _ in range(1500):
        dice = rng.random()
        if dice < 0.35:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 40))]
            num_cached, match = cache.match(pack(tokens))
            assert num_cached < len(tokens)
            held = cache.allocate(match)
            if cache.append(held, len(tokens)) is None:
                cache.release(held)
            else:
                running.append((held, tokens))
        elif dice < 0.5 and running:
            held, tokens = rng.choice(running)
            cache.insert(held, pack(tokens[: rng.randint(held.num_cached, len(tokens))]))
        elif dice < 0.7 and running:
            held, tokens = rng.choice(running)
            if cache.append(held, len(tokens) + 3) is not None:
                tokens += [rng.randrange(2) for _ in range(3)]
        elif running:
            held, tokens = running.pop(rng.randrange(len(running)))
            cache.release(held, pack(tokens[: rng.randint(0, len(tokens))]))
        cache.check()
    for held, _ in running:
        cache.release(held)
    cache.check()
    assert cache.num_used == 0 and cache.num_free + cache.num_cached == 40
