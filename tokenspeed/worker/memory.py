"""How memory is divided: measured weights and workspace, then as many KV pages as the rest holds."""

from dataclasses import dataclass, field
from pathlib import Path

from tokenspeed.errors import ConfigError

GIB = 1 << 30
CPU_KV_BYTES = 2 * GIB  # a laptop's share for the KV pool unless asked otherwise
CPU_KV_SHARE = 0.4  # at most this part of the memory that is free
MIN_PAGES = 4  # without the dummy page


@dataclass
class MemoryPlan:
    """Bytes by purpose, and what fits. `lines()` is what start-up prints."""

    total: int  # what the engine may use
    parts: dict[str, int] = field(default_factory=dict)  # target, draft, workspace, graphs
    page_bytes: int = 0  # K/V of target and draft and the aux states of a page
    draft_page_bytes: int = 0  # of them, the draft's share
    page_size: int = 16
    num_pages: int = 0  # with the dummy page
    max_num_seqs: int = 0

    @property
    def num_tokens(self) -> int:
        return (self.num_pages - 1) * self.page_size

    def fill(
        self, wanted_tokens: int | None, max_model_len: int, cap_bytes: int | None = None
    ) -> "MemoryPlan":
        """Settles num_pages.

        Raises:
            ConfigError: not even one short request fits, or the tokens asked for don't; with the smallest
                change that helps.
        """
        free = self.total - sum(self.parts.values())
        fits = free // self.page_bytes - 1
        if fits < MIN_PAGES:
            raise self._too_little((MIN_PAGES + 1) * self.page_bytes)
        budget = free if cap_bytes is None else min(free, cap_bytes)
        pages = min(budget // self.page_bytes - 1, -(-self.max_num_seqs * max_model_len // self.page_size))
        if wanted_tokens is not None:
            pages = -(-wanted_tokens // self.page_size)
            if pages > fits:
                need = (pages + 1) * self.page_bytes / GIB
                raise ConfigError(
                    f"a KV pool of {wanted_tokens} tokens needs {need:.2f} GiB but {free / GIB:.2f} GiB are "
                    f"free; give --kv-cache-tokens {fits * self.page_size} or less"
                )
        self.num_pages = max(pages, MIN_PAGES) + 1
        return self

    def reserve_weights(self, num_bytes: int) -> None:
        """Looks, before weights are read, whether there is room for them. Raises ConfigError."""
        if num_bytes > self.total:
            raise self._too_little(num_bytes)

    def _too_little(self, more: int) -> ConfigError:
        need = sum(self.parts.values()) + more
        parts = f" ({self._named()})" if self.parts else ""
        return ConfigError(
            f"not enough memory: the model needs at least {need / GIB:.2f} GiB and {self.total / GIB:.2f} GiB may "
            f"be used{parts}; free memory, raise --gpu-memory-utilization, or choose a smaller model"
        )

    def lines(self, max_model_len: int) -> list[str]:
        kv = self.num_pages * self.page_bytes
        draft = self.num_pages * self.draft_page_bytes
        free = self.total - sum(self.parts.values()) - kv
        sizes = (
            f"{self._named()}, KV {(kv - draft) / GIB:.2f}, draft KV {draft / GIB:.2f}, free {free / GIB:.2f}"
        )
        full = self.num_tokens / max_model_len
        return [
            f"memory: {sizes} of {self.total / GIB:.2f} GiB",
            f"KV cache: {self.num_tokens} tokens; {self.max_num_seqs} requests at once, "
            f"{full:.1f} of {max_model_len} tokens each",
        ]

    def _named(self) -> str:
        return ", ".join(f"{name} {size / GIB:.2f}" for name, size in self.parts.items())


def available_cpu_memory() -> int:
    """Bytes this process may still take: the machine's free memory, or its cgroup's if that is less."""
    text = Path("/proc/meminfo").read_text() if Path("/proc/meminfo").exists() else ""
    found = [int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("MemAvailable:")]
    free = found[0] if found else 8 * GIB
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (value := limit.read_text().strip()) != "max":
        free = min(free, int(value) - int(used.read_text()))
    return free
