"""What /metrics says: gauges and counters from the scheduler's `Stats`, latencies from the server.

Counters that the scheduler sends in `Stats.counters`, cumulative since its start, as is
`Stats.spec_accepted_per_pos` (entry i: rounds in which the draft token of depth i + 1 was accepted):

    prompt_tokens                    prompt tokens of admitted requests, cached ones included
    generation_tokens                tokens generated and kept
    prefix_cache_queries             prompt tokens looked up in the prefix cache
    prefix_cache_hits                of them, found
    num_preemptions                  requests put back to recompute later
    spec_decode_num_drafts           decode rounds of one request with a draft tree
    spec_decode_num_draft_tokens     draft nodes offered in them, the root not counted
    spec_decode_num_accepted_tokens  draft tokens kept; the token a round yields anyway is not counted
    spec_decode_num_nan_drafts       draft trees with logits that were NaN; those rank last, the text is right
    spec_decode_plain_rounds         decode rounds of one request without a tree
    spec_decode_expected_tokens      tokens that the plan expected of the rounds with trees; what came is
                                     num_drafts + num_accepted_tokens (0 where one tree is pinned)
    steps                            engine steps
    graphed_steps                    of them, whose round was the replay of a CUDA graph
    num_nan_aborted_requests         requests ended because their logits were not finite

Everything is called tokenspeed:NAME. What existing dashboards and benchmark clients read by vLLM's names is
there under those names too.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenspeed.ipc.messages import Stats

COUNTERS = {
    "prompt_tokens": "Prompt tokens of admitted requests",
    "generation_tokens": "Tokens generated and kept",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache",
    "num_preemptions": "Requests put back to be recomputed",
    "spec_decode_num_drafts": "Rounds of a request with a draft tree",
    "spec_decode_num_draft_tokens": "Draft tokens offered",
    "spec_decode_num_accepted_tokens": "Draft tokens accepted",
    "spec_decode_num_nan_drafts": "Draft trees with logits that were NaN",
    "spec_decode_plain_rounds": "Rounds of a request without a draft tree",
    "spec_decode_expected_tokens": "Tokens that the plan expected of rounds with a draft tree",
    "steps": "Engine steps",
    "graphed_steps": "Steps whose round was the replay of a CUDA graph",
    "num_nan_aborted_requests": "Requests ended by logits that were not finite",
}
VLLM_COUNTERS = frozenset(COUNTERS) - {
    "spec_decode_num_nan_drafts", "spec_decode_plain_rounds", "spec_decode_expected_tokens", "steps",
    "graphed_steps", "num_nan_aborted_requests",
}  # fmt: skip
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
FIRST_TOKEN_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0,
)  # fmt: skip
TOKEN_BOUNDS = (
    0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0,
    5.0,
)  # fmt: skip
REQUEST_BOUNDS = (
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    60.0,
    120.0,
    480.0,
    1920.0,
)
REASONS = ("stop", "length", "abort", "error")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Counts of values per bucket, cheap enough to be fed with every token."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """`count` times the same value, in seconds."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        total, out = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            out.append((bound, float(total)))
        return out


class Metrics(Collector):
    """An `Observer` of the EngineClient, and the collector of its own registry."""

    def __init__(self, model_name: str, stats: Callable[[], Stats]):
        self._labels, self._values, self._stats = ["model_name"], [model_name], stats
        self.histograms = {
            "time_to_first_token_seconds": Histogram(FIRST_TOKEN_BOUNDS),
            "inter_token_latency_seconds": Histogram(TOKEN_BOUNDS),
            "request_time_per_output_token_seconds": Histogram(TOKEN_BOUNDS),
            "e2e_request_latency_seconds": Histogram(REQUEST_BOUNDS),
        }
        self._first, self._token, self._per_token, self._whole = self.histograms.values()
        self.ended = dict.fromkeys(REASONS, 0)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    # ---- Observer

    def first_token(self, since_start: float) -> None:
        self._first.observe(since_start)

    def more_tokens(self, since_last: float, count: int) -> None:
        """A piece of `count` tokens: each counts as having taken its share of the time."""
        self._token.observe(since_last / count, count)

    def finished(self, reason: str, since_start: float, since_first: float, num_tokens: int) -> None:
        self.ended[reason] = self.ended.get(reason, 0) + 1
        if reason in ("stop", "length"):
            self._whole.observe(since_start)
            if num_tokens > 1:
                self._per_token.observe(since_first / (num_tokens - 1))

    # ---- output

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for prefix in ("tokenspeed", "vllm"):
            yield from self._gauges(prefix, stats)
            yield from self._counters(prefix, stats)
            for name, histogram in self.histograms.items():
                family = HistogramMetricFamily(f"{prefix}:{name}", "Seconds", labels=self._labels)
                family.add_metric(self._values, histogram.buckets(), histogram.sum)
                yield family
        yield self._one(
            GaugeMetricFamily,
            "tokenspeed:spec_accept_length",
            "Tokens a drafting round",
            accept_length(stats) or 1.0,
        )

    def _gauges(self, prefix: str, stats: Stats) -> Iterator[Metric]:
        used = stats.pages_total - stats.pages_free - stats.pages_cached
        for name, text, value in (
            ("num_requests_running", "Requests that run", stats.num_running),
            ("num_requests_waiting", "Requests that wait", stats.num_waiting),
            (
                "kv_cache_usage_perc",
                "Share of KV pages held by requests, 0 to 1",
                used / (stats.pages_total or 1),
            ),
        ):
            yield self._one(GaugeMetricFamily, f"{prefix}:{name}", text, value)

    def _counters(self, prefix: str, stats: Stats) -> Iterator[Metric]:
        for name, text in COUNTERS.items():
            if prefix == "tokenspeed" or name in VLLM_COUNTERS:
                value = stats.counters.get(name, 0.0)
                yield self._one(CounterMetricFamily, f"{prefix}:{name}", text, value)
        positions = CounterMetricFamily(
            f"{prefix}:{PER_POSITION}", "Draft tokens accepted by depth", labels=[*self._labels, "position"]
        )
        for i, count in enumerate(stats.spec_accepted_per_pos):
            positions.add_metric([*self._values, str(i)], count)
        yield positions
        if prefix == "tokenspeed":
            rounds = CounterMetricFamily(
                "tokenspeed:spec_decode_rounds", "Rounds by tree", labels=[*self._labels, "shape"]
            )
            for shape, count in stats.spec_rounds.items():
                rounds.add_metric([*self._values, shape], count)
            yield rounds
        ended = CounterMetricFamily(
            f"{prefix}:request_success", "Requests ended", labels=[*self._labels, "finished_reason"]
        )
        for reason, count in self.ended.items():
            ended.add_metric([*self._values, reason], count)
        yield ended

    def _one(self, family: type[Metric], name: str, text: str, value: float) -> Metric:
        metric = family(name, text, labels=self._labels)
        metric.add_metric(self._values, value)
        return metric


def accept_length(stats: Stats) -> float | None:
    """Mean tokens of a drafting round, the one that is sure included; None before the first."""
    drafts = stats.counters.get("spec_decode_num_drafts", 0)
    return 1 + stats.counters.get("spec_decode_num_accepted_tokens", 0) / drafts if drafts else None
