"""Log-probabilities of kept tokens, from the target's raw logits."""

import torch
from torch import Tensor

from tokenspeed.ipc.messages import Logprobs


def logprobs_of(logits: Tensor, tokens: Tensor, num_top: int) -> list[Logprobs]:
    """Of tokens[i] under logits[i], with the `num_top` likeliest beside it.

    Args:
        logits: float32 [n, V]. tokens: int64 [n].
    """
    logp = torch.log_softmax(logits, -1)
    chosen = logp.gather(1, tokens[:, None])[:, 0].tolist()
    if num_top == 0:
        return [Logprobs(value) for value in chosen]
    values, ids = logp.topk(num_top, dim=-1)
    return [Logprobs(c, i, v) for c, i, v in zip(chosen, ids.tolist(), values.tolist(), strict=True)]
