"""`LLM`: offline generation on the same ring as the server, with vLLM's argument and output names."""

import asyncio
import concurrent.futures
import contextlib
import json
import random
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenspeed.config import Config
from tokenspeed.errors import EngineDead, RequestError
from tokenspeed.ipc.messages import Finished, Text, TokenText, unpack
from tokenspeed.launch import Ring, resolve
from tokenspeed.params import SamplingParams
from tokenspeed.progress import Bars
from tokenspeed.server.client import EngineClient, Generation

_OPEN_AT_ONCE = 4096  # requests in the ring; the rest wait here


@dataclass
class CompletionOutput:
    """One choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenText] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    metrics: dict[str, Any] = field(
        default_factory=dict
    )  # acceptance: num_rounds, num_drafted, num_accepted, ...


@dataclass
class RequestOutput:
    """One prompt's answer. `metrics` sums over its choices what CompletionOutput.metrics says."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenText] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)


class LLM:
    """An engine for programs: starts the processes, generates, stops them on `shutdown()` or at exit.

    Args:
        model: directory, GGUF file, hub name, or "demo".
        speculative_config: vLLM's dictionary: method, model, num_speculative_tokens,
            draft_tensor_parallel_size.
        options: any field of `tokenspeed.config.Config`, by name.

    Raises:
        ConfigError: something the user can mend. EngineDead: a process broke.
    """

    def __init__(
        self, model: str = "demo", *, speculative_config: dict[str, Any] | str | None = None, **options: Any
    ):
        if isinstance(speculative_config, dict):
            speculative_config = json.dumps(speculative_config)
        config = Config.from_kwargs(model=model, speculative_config=speculative_config, **options)
        bars = Bars(sys.stderr)
        resolved = resolve(config, bars.update)
        self._ring = Ring(resolved, bars)
        self._lock = threading.Lock()
        try:
            self._ring.start()
        except BaseException:
            self._ring.close()
            raise
        bars.close()
        self.info = dict(self._ring.info)
        self.vocab_size = resolved.model.vocab_size
        self._seeds = None if config.seed is None else random.Random(config.seed)
        self._loop = _event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="tokenspeed-client")
        self._thread.start()
        self._client: EngineClient = self._wait(self._connect())

    def generate(
        self,
        prompts: str | Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        concurrency: int | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts, all at once or `concurrency` at a time.

        Args:
            prompts: text, a list of texts, lists of token ids, or {"prompt": ...} / {"prompt_token_ids": ...}.
            sampling_params: one for all or one each.
            use_tqdm: show a progress bar.
            concurrency: requests in the engine at once; when one ends, the next prompt follows (default: as
                many as the engine takes).

        Raises:
            RequestError: a prompt or a parameter that can't be served. EngineDead.
        """
        if isinstance(prompts, (str, dict)) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        return self._run([_prompt(p) for p in prompts], sampling_params, use_tqdm, concurrency)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        concurrency: int | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations: a list of messages, or a list of such lists. See `generate`."""
        if messages and isinstance(messages[0], dict):
            messages = [messages]
        conversations = [{"messages": json.dumps(list(m)).encode()} for m in messages]
        return self._run(conversations, sampling_params, use_tqdm, concurrency)

    def shutdown(self) -> None:
        """Stops the processes. Safe to call twice."""
        if self._loop.is_running():
            with contextlib.suppress(EngineDead):
                self._wait(self._client.close(), watch=False)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)
            self._loop.close()
        self._ring.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        if "_client" in self.__dict__:
            self.shutdown()

    # ---- the loop's side

    async def _connect(self) -> EngineClient:
        ring = self._ring
        client = EngineClient.connect(ring.run_dir, ring.resolved.config.watchdog_timeout)
        client.start()
        return client

    def _wait(self, work: Any, watch: bool = True) -> Any:
        """Runs a coroutine in the client's loop while watching the processes."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            try:
                return future.result(0.25)
            except concurrent.futures.TimeoutError:
                if future.done():  # the work itself timed out
                    raise
            dead = self._ring.poll(0) if watch else None
            if dead is not None:
                future.cancel()
                raise EngineDead(f"the {dead.who} process has died: {dead.error}")

    def _run(
        self, prompts: list[dict], params: Any, use_tqdm: bool, concurrency: int | None
    ) -> list[RequestOutput]:
        if concurrency is not None and concurrency < 1:
            raise RequestError(f"concurrency must be at least 1, not {concurrency}", "concurrency")
        every = (
            list(params) if isinstance(params, (list, tuple)) else [params or SamplingParams()] * len(prompts)
        )
        if len(every) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(every)} sampling_params", "sampling_params")
        for p, prompt in zip(every, prompts, strict=True):
            p.check(self.vocab_size)
            if not p.max_tokens and p.max_tokens is not None:
                raise RequestError("max_tokens must be at least 1", "max_tokens")
            prompt_ids = prompt.get("token_ids")
            if prompt_ids is not None and not all(0 <= t < self.vocab_size for t in prompt_ids):
                raise RequestError("a prompt token id is not in the vocabulary", "prompt")
        with self._lock:
            return self._wait(self._generate(prompts, every, use_tqdm, concurrency or _OPEN_AT_ONCE))

    async def _generate(
        self, prompts: list[dict], params: list[SamplingParams], use_tqdm: bool, concurrency: int
    ) -> list[RequestOutput]:
        gate = asyncio.Semaphore(concurrency)
        bars = Bars(sys.stderr) if use_tqdm else None
        done = 0

        async def one(number: int) -> RequestOutput:
            nonlocal done
            async with gate:
                out = await self._one(number, prompts[number], params[number])
            done += 1
            if bars is not None:
                bars.update("generating", done, len(prompts))
            return out

        tasks = [asyncio.ensure_future(one(i)) for i in range(len(prompts))]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            if bars is not None:
                bars.close()

    async def _one(self, number: int, prompt: dict, params: SamplingParams) -> RequestOutput:
        out = RequestOutput(str(number), prompt.get("text"))
        generation = Generation(self._client)
        try:
            rids = [generation.add(params.resolved(i, self._seeds), **prompt) for i in range(params.n)]
            choices = {rid: CompletionOutput(i) for i, rid in enumerate(rids)}
            async for piece in generation:
                _take(out, choices[piece.rid], piece)
        finally:
            generation.close()
        out.outputs = list(choices.values())
        out.finished = True
        out.metrics = _summed([choice.metrics for choice in out.outputs])
        return out


def _event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # there is none for this system
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _prompt(prompt: Any) -> dict:
    """As arguments of `Generation.add`. Raises RequestError."""
    if isinstance(prompt, str):
        return {"text": prompt}
    if isinstance(prompt, dict) and isinstance(prompt.get("prompt"), str):
        return {"text": prompt["prompt"]}
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
    if isinstance(ids, (list, tuple)) and ids and all(isinstance(t, int) for t in ids):
        return {"token_ids": list(ids)}
    raise RequestError(
        "a prompt must be a text, a list of token ids, or a dict with prompt or prompt_token_ids", "prompt"
    )


def _take(out: RequestOutput, choice: CompletionOutput, piece: Text) -> None:
    """Adds a piece to its choice. Raises RequestError when it says that the request can't be served."""
    if piece.finished is not None and piece.finished.reason == "error":
        raise RequestError(piece.finished.message, piece.finished.param, piece.finished.status)
    choice.text += piece.text
    choice.token_ids.extend(unpack(piece.token_ids))
    if piece.logprobs:
        choice.logprobs = (choice.logprobs or []) + piece.logprobs
    if piece.prompt_token_ids:
        out.prompt_token_ids = unpack(piece.prompt_token_ids)
    if piece.prompt_logprobs:
        out.prompt_logprobs = piece.prompt_logprobs
    if piece.finished is not None:
        choice.finish_reason, choice.stop_reason = piece.finished.reason, piece.stop_reason
        choice.metrics = _metrics(piece.finished)


def _metrics(finished: Finished) -> dict[str, Any]:
    return {
        "num_prompt_tokens": finished.num_prompt,
        "num_output_tokens": finished.num_output,
        "num_cached_tokens": finished.num_cached,
        "num_rounds": finished.num_rounds,
        "num_drafted": finished.num_drafted,
        "num_accepted": finished.num_accepted,
        "accept_length": 1 + finished.num_accepted / finished.num_rounds if finished.num_rounds else None,
        "accepted_per_depth": list(finished.accepted_per_depth),
    }


def _summed(parts: list[dict[str, Any]]) -> dict[str, Any]:
    if len(parts) == 1:
        return dict(parts[0])
    names = (
        "num_prompt_tokens",
        "num_output_tokens",
        "num_cached_tokens",
        "num_rounds",
        "num_drafted",
        "num_accepted",
    )
    total: dict[str, Any] = {name: sum(part[name] for part in parts) for name in names}
    total["accept_length"] = 1 + total["num_accepted"] / total["num_rounds"] if total["num_rounds"] else None
    depths = [part["accepted_per_depth"] for part in parts]
    longest = max(map(len, depths))
    total["accepted_per_depth"] = [sum(d[i] for d in depths if i < len(d)) for i in range(longest)]
    return total
