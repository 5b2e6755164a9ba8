"""Accept length by position: the same last questions behind earlier turns of a chat that fill 1k, 4k, 8k tokens.

    python benchmarks/positions.py MODEL --prompts P.jsonl [--draft D] [--positions 1024,4096,8000] [--num 24]

P.jsonl comes from benchmarks/prompts.py. Every prompt is answered by the model once; questions with their answers, the
last of them cut, are the earlier turns, others for each question and none twice in a chat. Greedy, all questions at
once, one tree. A position past the draft's own max_position_embeddings is measured too where the target allows one.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenspeed import LLM, SamplingParams
from tokenspeed.bench.offline import measure
from tokenspeed.bench.report import document, write_json
from tokenspeed.bench.workload import Prompt, load_prompts
from tokenspeed.cli.args import Parser, positive, positives
from tokenspeed.config import Config
from tokenspeed.errors import ConfigError, RequestError
from tokenspeed.launch import resolve
from tokenspeed.tokenizer.encoder import Encoder

RESULTS = Path(__file__).parent / "results"
PAST = 256  # tokens past the draft's limit

Messages = list[dict[str, str]]


def conversation(
    question: Messages, turns: Sequence[Messages], num_tokens: int, count: Callable[[Messages], int]
) -> Messages:
    """Of `turns`, (question, answer) each, as many as fit in `num_tokens` before `question`, the last answer cut.

    Args:
        count: tokens of a rendered chat.

    Raises:
        ConfigError: all turns together are shorter than that.
    """
    earlier: Messages = []
    for turn in turns:
        if count([*earlier, *turn, *question]) <= num_tokens:
            earlier += turn
            continue
        *asked, answer = turn
        words, low, high = answer["content"].split(" "), 0, len(answer["content"].split(" "))
        while low < high:  # the most words that fit
            middle = (low + high + 1) // 2
            cut = {**answer, "content": " ".join(words[:middle])}
            low, high = (
                (middle, high)
                if count([*earlier, *asked, cut, *question]) <= num_tokens
                else (low, middle - 1)
            )
        cut = [*asked, {**answer, "content": " ".join(words[:low])}] if low else []
        return [*earlier, *cut, *question]
    raise ConfigError(f"{len(turns)} earlier turns are shorter than {num_tokens} tokens; give more --prompts")


def main() -> None:
    args = _parse()
    options = {"spec": "eagle4", "draft": args.draft, "spec_shape": args.shape, "device": args.device,
               "dtype": args.dtype, "max_model_len": args.max_model_len, "max_num_seqs": args.num,
               "kv_cache_tokens": args.kv_cache_tokens,
               "gpu_memory_utilization": args.gpu_memory_utilization}  # fmt: skip
    options = {name: value for name, value in options.items() if value is not None}
    resolved = resolve(Config(model=args.model, **options), lambda *_: None)
    positions, limit = _positions(args, resolved.max_model_len, resolved.draft_dir)
    encoder = Encoder.load(resolved.model_dir)

    def count(messages: Messages) -> int:
        text = encoder.chat.render(json.dumps(messages).encode())
        return len(encoder.encode([text], add_special_tokens=False)[0])

    prompts, asked = load_prompts(args.prompts), load_prompts(args.prompts, args.num)
    rows: list[dict[str, Any]] = []
    with LLM(args.model, **options) as llm:
        answers = llm.chat([list(p.messages) for p in prompts], _greedy(args.filler_tokens), use_tqdm=True)
        turns = [_turn(p, out.outputs[0].text) for p, out in zip(prompts, answers, strict=True)]
        chats = {
            position: [_chat(p, prompts, turns, position, count) for p in asked] for position in positions
        }
        for position in positions:
            found, records = measure(llm, chats[position], args.num, _greedy(args.max_tokens), show=True)
            first = rows[0]["acceptance"] if rows else found["acceptance"]
            ratios = {f"{name}_over_first": _ratio(found["acceptance"], first, name)
                      for name in ("accept_length", "accept_length_no_loops")}  # fmt: skip
            mean = sum(len(r.prompt_ids) for r in records) / len(records)
            rows.append({"position": position, "mean_prompt_tokens": round(mean, 1), **ratios, **found})
            print(json.dumps({"position": position, **ratios, "acceptance": found["acceptance"]}), flush=True)
        info = llm.info
    about = {"model": args.label or args.model, "shape": args.shape, "max_tokens": args.max_tokens,
             "draft_max_position_embeddings": limit, "engine": info}  # fmt: skip
    write_json(RESULTS / f"{args.name}.json", document("positions", rows, **about))


def _positions(args: argparse.Namespace, max_model_len: int, draft: str) -> tuple[list[int], int | None]:
    """Those that leave room for the answer, one past the draft's own limit among them; and that limit."""
    limit = json.loads((Path(draft) / "config.json").read_text()).get("max_position_embeddings")
    wanted = {*args.positions, *([limit + PAST] if limit else [])}
    fit = sorted(p for p in wanted if p + args.max_tokens <= max_model_len)
    for position in sorted(wanted - set(fit)):
        print(f"position {position} is left out: the context ends at {max_model_len}", file=sys.stderr)
    if not fit:
        raise ConfigError("no position leaves room for an answer")
    return fit, limit


def _turn(prompt: Prompt, answer: str) -> Messages:
    return [*prompt.messages, {"role": "assistant", "content": answer}]


def _chat(
    prompt: Prompt,
    prompts: Sequence[Prompt],
    turns: Sequence[Messages],
    num_tokens: int,
    count: Callable[[Messages], int],
) -> Prompt:
    """The prompt after the turns that follow its own in the list, around its end."""
    at = prompts.index(prompt)
    others = [*turns[at + 1 :], *turns[:at]]
    return Prompt(prompt.category, tuple(conversation(list(prompt.messages), others, num_tokens, count)))


def _ratio(acceptance: dict | None, first: dict | None, name: str) -> float | None:
    """None where nothing was drafted, or every answer loops."""
    if not acceptance or not first or acceptance[name] is None or not first[name]:
        return None
    return round(acceptance[name] / first[name], 4)


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def _parse() -> argparse.Namespace:
    parser = Parser(prog="positions.py", description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompts", default="builtin", metavar="FILE")
    parser.add_argument("--draft")
    parser.add_argument("--shape", default="8/4/16")
    parser.add_argument("--positions", type=positives, default=(1024, 4096, 8000), metavar="N,N,...")
    parser.add_argument("--num", type=positive, default=24, help="last questions, all at once")
    parser.add_argument("--max-tokens", type=positive, default=128)
    parser.add_argument("--filler-tokens", type=positive, default=256, help="of an earlier answer, at most")
    parser.add_argument("--max-model-len", type=positive)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype")
    parser.add_argument("--kv-cache-tokens", type=positive)
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument("--label")
    parser.add_argument("--name", default="positions", help="of the file in benchmarks/results")
    return parser.parse(sys.argv[1:])


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, RequestError) as error:
        sys.exit(f"positions: error: {error}")
