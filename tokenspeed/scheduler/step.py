"""A step while it is put together, its encoding for the worker, and what is kept of it until the answer."""

from dataclasses import dataclass, field

from tokenspeed.config import Shape
from tokenspeed.ipc.messages import Admit, Step, pack
from tokenspeed.scheduler.request import Request


@dataclass(slots=True)
class StepInFlight:
    step: int
    prefill: list[tuple[Request, int]]  # and where its chunk ends
    decode: list[Request]
    shape: Shape | None


@dataclass(slots=True)
class Growth:
    """The requests and pages that a Step adds, while it is put together."""

    admit: list[Admit] = field(default_factory=list)
    page_slots: list[int] = field(default_factory=list)
    page_ids: list[int] = field(default_factory=list)

    def add_pages(self, slot: int, pages: list[int]) -> None:
        self.page_slots += [slot] * len(pages)
        self.page_ids += pages


def encode_step(
    number: int,
    release: list[int],
    growth: Growth,
    chunks: list[tuple[Request, int]],
    starts: list[int],
    decode: list[Request],
    shape: Shape | None,
) -> Step:
    """chunks: requests and their numbers of tokens. starts: where each chunk begins."""
    return Step(
        step=number,
        release=pack(release),
        admit=growth.admit,
        page_slots=pack(growth.page_slots),
        page_ids=pack(growth.page_ids),
        prefill_slots=pack([request.slot for request, _ in chunks]),
        prefill_starts=pack(starts),
        prefill_counts=pack([count for _, count in chunks]),
        decode_slots=pack([request.slot for request in decode]),
        shape=(shape.steps, shape.topk, shape.nodes) if shape else None,
    )
