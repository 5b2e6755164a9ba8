"""A streamed answer over HTTP: python examples/stream_chat.py 'QUESTION' [URL]

Start a server first, for example with `tokenspeed serve demo --spec eagle4`. Needs only httpx.
"""

import json
import sys

import httpx


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print("usage: python examples/stream_chat.py 'QUESTION' [URL]", file=sys.stderr)
        return 2
    url = sys.argv[2] if len(sys.argv) == 3 else "http://127.0.0.1:8000"
    with httpx.Client(base_url=url, timeout=60) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": sys.argv[1]}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[len("data: ") :])
                for choice in event["choices"]:
                    print(choice["delta"].get("content") or "", end="", flush=True)
                if event.get("usage"):
                    print(f"\n({event['usage']['completion_tokens']} tokens)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
