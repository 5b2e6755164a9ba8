"""The pool of KV pages: which are free, and how many holders each of the others has."""

from collections.abc import Iterable


class PagePool:
    """Pages 1 .. num_pages - 1. Page 0 is the dummy that padding writes to; it is never handed out.

    A page has one reference from the prefix tree if the tree holds it, and one from each request that has it
    in its block table. It is free when it has none.
    """

    def __init__(self, num_pages: int):
        """num_pages: with the dummy page."""
        self.num_pages = num_pages
        self.refs = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: the page freed last is handed out first

    @property
    def num_total(self) -> int:
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free pages, one reference each. The caller has made sure that there are so many."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        if count == 0:
            return []
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for page in pages:
            self.refs[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more reference for each page; none of them may be free."""
        for page in pages:
            assert self.refs[page] > 0, f"page {page} is free and can't be shared"
            self.refs[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One reference less for each page; those left without any become free."""
        for page in pages:
            assert self.refs[page] > 0, f"page {page} is free and can't be dropped"
            self.refs[page] -= 1
            if self.refs[page] == 0:
                self._free.append(page)

    def check(self) -> None:
        """Raises AssertionError when the free list and the references disagree."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is in the free list twice"
        assert 0 not in free and self.refs[0] == 0, "the dummy page has been handed out"
        for page in range(1, self.num_pages):
            refs = self.refs[page]
            assert refs >= 0 and (refs == 0) == (page in free), (
                f"page {page}: {refs} references, free: {page in free}"
            )
