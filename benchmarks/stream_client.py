"""One process of the load that benchmarks/streaming.py puts on a server: does as little as a client can.

It reads a job from stdin as one line of JSON, {"host", "port", "concurrency", "bodies", "queue"}, says "ready", waits
for a line, and keeps `concurrency` streamed chats open until all bodies are answered. `queue` is a pipe that the
clients share: whoever is free reads the number of the next body from it, so that none has work left when another has
not. Then it prints one line of JSON: tokens (as the server's usage tells), events, and the seconds of CPU time that it
took. It parses no event but each answer's last, so that it isn't what limits the stream.
"""

import asyncio
import json
import os
import re
import sys
import time

MARK = b"\ndata: "
USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
NUMBER = 4  # bytes of an entry of the queue, little-endian
TAIL = 8192  # bytes at the end of an answer that hold its usage


async def ask(host: str, port: int, body: dict) -> tuple[int, int]:
    """One streamed chat: (tokens, events). Raises ValueError for an answer without an end or with an error."""
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head.encode() + content)
    first = await reader.readline()
    tail, events = b"", 0
    while data := await reader.read(1 << 16):
        events += (tail[1 - len(MARK) :] + data).count(MARK)
        tail = (tail + data)[-TAIL:]
    writer.close()
    usage = USAGE.findall(tail)
    if b" 200 " not in first or b"data: [DONE]" not in tail or not usage:
        raise ValueError(f"{first.decode().strip()}: {tail[-300:].decode(errors='replace').strip()}")
    return int(usage[-1]), events


async def load(job: dict) -> dict:
    """The closed loop."""
    found: list[tuple[int, int]] = []

    async def worker() -> None:
        while entry := os.read(job["queue"], NUMBER):  # never waits: all is written
            body = job["bodies"][int.from_bytes(entry, "little")]
            found.append(await ask(job["host"], job["port"], body))

    await asyncio.gather(*(worker() for _ in range(job["concurrency"])))
    return {"tokens": sum(tokens for tokens, _ in found), "events": sum(events for _, events in found)}


def main() -> int:
    job = json.loads(sys.stdin.readline())
    print("ready", flush=True)
    sys.stdin.readline()
    before = time.process_time()
    try:
        found = asyncio.run(load(job))
    except (OSError, ValueError) as error:
        found = {"error": str(error)}
    print(json.dumps({**found, "cpu_seconds": time.process_time() - before}), flush=True)
    return 1 if "error" in found else 0


if __name__ == "__main__":
    sys.exit(main())
