"""One plain round and one with a tree, eager or from graphs, and nothing else: for compute-sanitizer and profilers.

    compute-sanitizer --tool memcheck python benchmarks/one_round.py MODEL [--draft D] [--shape 8/4/16] [--context 256]

Tools that look at every access are slow: use a small model.
"""

import sys

import torch

from tokenspeed.cli.args import Parser, positive
from tokenspeed.config import Config
from tokenspeed.launch import resolve
from tokenspeed.spec.options import parse_shape
from tokenspeed.worker.calibrate import requests
from tokenspeed.worker.graph import GraphSet
from tokenspeed.worker.setup import build


def main() -> None:
    args = _parse()
    config = Config(model=args.model, spec="eagle4", draft=args.draft, spec_shape=args.shape, enforce_eager=True,
                    kv_cache_tokens=8192, max_model_len=2048, max_num_seqs=args.batch)  # fmt: skip
    engine = build(resolve(config, lambda *_: None), lambda *_: None).runner.engine
    shape, slots = parse_shape(args.shape), list(range(args.batch))
    rows = torch.tensor(slots, device=engine.state.device)
    with torch.inference_mode(), requests(engine, slots, args.context) as fits:
        assert fits
        for kind in (None, shape):
            engine.round(rows, [], kind, None)
        torch.cuda.synchronize()
        if args.graphs:
            graphs = GraphSet(engine, {args.batch: (None, shape)})
            graphs.capture(lambda *_: None)
            for kind in (None, shape):
                graphs.replay(slots, kind)
            torch.cuda.synchronize()
    print("done")


def _parse():
    parser = Parser(prog="one_round.py", description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--draft")
    parser.add_argument("--shape", default="8/4/16")
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument("--context", type=positive, default=256)
    parser.add_argument("--graphs", action="store_true", help="replay captured rounds too")
    return parser.parse(sys.argv[1:])


if __name__ == "__main__":
    main()
