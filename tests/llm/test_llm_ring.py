"""`LLM` with a real ring: engines that live one after another."""

from tokenspeed import LLM, SamplingParams


def test_a_closed_engine_leaves_the_next_one_alone(tiny_model_dir):
    """Closed twice, it once closed file descriptors that had become the next engine's."""
    options = dict(model=str(tiny_model_dir("llama")), dtype="float32", device="cpu")
    first = LLM(**options)
    first.shutdown()
    with LLM(**options) as second:
        first.shutdown()
        del first
        out = second.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert len(out[0].outputs[0].token_ids) == 4
