"""What the scheduler has counted since it started, for /metrics."""

from collections import Counter
from dataclasses import dataclass, field, fields

from tokenspeed.config import Shape
from tokenspeed.scheduler.request import num_at_least, total
from tokenspeed.spec.options import MAX_STEPS


@dataclass(slots=True)
class Counters:
    prompt_tokens: int = 0  # of requests whose prefill has ended
    generation_tokens: int = 0  # sent out
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    num_preemptions: int = 0
    spec_decode_num_draft_tokens: int = 0  # nodes of trees, without the roots
    spec_decode_num_nan_drafts: int = 0  # trees of a draft whose logits were NaN
    spec_decode_expected_tokens: float = 0.0  # of the rounds with trees, by the plan
    spec_decode_plain_rounds: int = 0  # rounds without a tree: one for each request and round
    steps: int = 0
    graphed_steps: int = 0  # whose round was a CUDA graph's replay
    num_nan_aborted_requests: int = 0
    rounds: Counter[str] = field(default_factory=Counter)  # by tree, "plain" for none
    accepted: list[int] = field(default_factory=lambda: [0] * (MAX_STEPS + 1))  # [a] trees that gave a tokens

    def count_round(self, shape: Shape | None, rows: int, expected_tokens: float) -> None:
        """Books a decode round of `rows` requests; `expected_tokens`: of all rounds with trees so far."""
        self.rounds[str(shape or "plain")] += rows > 0
        self.spec_decode_plain_rounds += 0 if shape else rows
        self.spec_decode_expected_tokens = round(expected_tokens, 1)

    def accepted_per_pos(self) -> list[int]:
        """[d]: trees of which a token at depth d + 1 was kept."""
        return num_at_least(self.accepted)

    def as_dict(self) -> dict[str, float]:
        out = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("accepted", "rounds")}
        out["spec_decode_num_drafts"] = sum(self.accepted)  # trees: one for each request and round
        out["spec_decode_num_accepted_tokens"] = total(self.accepted)
        return out
