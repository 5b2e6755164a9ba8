"""How each Triton kernel is called: argument types by name, and representative constants."""

import importlib
import itertools
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, replace

from triton.runtime import JITFunction

from tokenspeed.kernels import triton as package
from tokenspeed.kernels.triton.few_rows import gated_tile, sums_tile, whole_tile
from tokenspeed.kernels.triton.small_layer import BLOCK_T, block_k, small_tile

_TYPE_NAMES = {
    "data": "x weight norm_weight residual bias gate_up q k v k_store v_store k_cache v_cache tail_k tail_v kv out "
    "table aux root_aux state token_gain state_gain slot_aux page_aux",
    "*i64": "positions slots indices mask path_slots seeds src dst candidates ids root tokens parents "
    "scratch depths sampled path counts emitted last_indices next_positions kv_slots last_tokens lengths source target "
    "token_ids places lanes lane_mask all_tokens all_parents next_tokens next_rows next_mask next_lanes",
    "*i32": "block_table prefix_lens starts cu_rows top_k chosen ranks part_token",
    "*fp32": "cos_sin part_acc part_peak part_total logits temperature top_p min_p maxima partial share scores "
    "lane_scores all_scores next_scores "
    "partials",
    "fp32": "eps scale",
}
_TYPES = {name: kind for kind, names in _TYPE_NAMES.items() for name in names.split()}
_HALVES, _ALL = ("bf16", "fp16"), ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Build:
    """One way to compile a kernel."""

    constants: dict
    dtypes: tuple[str, ...] = ("bf16",)
    num_warps: int = 4
    num_stages: int = 2
    types: tuple[tuple[str, str], ...] = ()  # argument types that differ from the common ones

    @property
    def pdl(self) -> bool:
        """Launched early, which only NVIDIA's GPUs can."""
        return self.constants.get("PDL", False)

    def signature(self, kernel: JITFunction, dtype: str) -> dict[str, str]:
        types = _TYPES | dict(self.types)
        found = {}
        for name in kernel.arg_names:
            kind = "constexpr" if name in self.constants else types.get(name, "i32")
            found[name] = f"*{dtype}" if kind == "data" else kind
        return found


def _attention(**more) -> dict:
    return dict(GROUP=4, NUM_KV_HEADS=8, DIM=128, PAGE=16, PRECISION="ieee", BLOCK_D=128) | more


def _trees() -> Iterator[Build]:
    """What is asked for (rotated q and any tail; the rows' own tail; lanes behind a buffer), by rows and splits."""
    for (rope, buffer), rows, split in itertools.product(
        ((False, True), (True, False), (True, True)), (16, 64), (False, True)
    ):
        dtypes = _HALVES if split and rows == 64 and rope and not buffer else _HALVES[:1]
        constants = dict(ROPE=rope, BUFFER=buffer, SPLIT=split, PDL=(rows == 16) == split, WINDOWED=not split)
        blocks = dict(BLOCK_R=rows, BLOCK_S=64, BLOCK_T=32 if rows == 64 and split else 16)
        yield Build(_attention(**constants, **blocks), dtypes)
    plain = dict(ROPE=True, BUFFER=False, SPLIT=True, PDL=False, WINDOWED=True)
    yield Build(_attention(**plain, BLOCK_R=64, BLOCK_S=32, BLOCK_T=32), ("fp32",))
    plain |= dict(WINDOWED=False, BLOCK_R=64, BLOCK_S=64, BLOCK_T=16)
    yield Build(_attention(**plain | dict(GROUP=3, NUM_KV_HEADS=3, DIM=64, BLOCK_D=64)))
    yield Build(_attention(**plain | dict(DIM=80)))
    yield Build(_attention(**plain | dict(ROPE=False)))


def _few_rows() -> Iterator[Build]:
    """Tiles of the 8B shape by rows of x, with K that ends inside a tile too, and float32."""
    for block_t, pdl in itertools.product((8, 16, 64), (False, True)):
        for gated, tile, types in (
            (True, gated_tile(14336), ()),
            (False, sums_tile(4096, 14336), (("out", "*fp32"),)),
            (False, whole_tile(6144), ()),
        ):
            even = pdl or block_t != 16
            constants = dict(GATED=gated, EVEN=even, PDL=pdl, AHEAD=256 if pdl and block_t == 8 else 0)
            constants |= dict(BLOCK_N=tile.rows, BLOCK_K=tile.depth, BLOCK_T=block_t)
            dtypes = _HALVES if gated and block_t == 8 else _HALVES[:1]
            yield Build(constants, dtypes, tile.warps, tile.stages(block_t), types)
    small = dict(GATED=False, EVEN=False, PDL=False, AHEAD=0, BLOCK_N=64, BLOCK_K=32, BLOCK_T=8)
    yield Build(small, ("fp32",), num_stages=7)


def _small(**more) -> Iterator[Build]:
    """SmolLM2's K and the largest, one row and several, the stream in float32 and in the weight's dtype."""
    for size, rows, pdl in (
        (576, 1, True),
        (576, 8, True),
        (1536, 8, True),
        (2048, 1, False),
        (576, 8, False),
    ):
        tile = small_tile(size, more.get("GATED", False))
        constants = (
            dict(PDL=pdl, SIZE=size, PARTS=tile.warps, BLOCK_N=tile.rows, BLOCK_K=block_k(size)) | more
        )
        constants |= dict(BLOCK_T=BLOCK_T) | (dict(BLOCK_R=rows) if more else {})
        wide = (("residual", "*fp32"),)
        yield Build(constants, _HALVES[:1], tile.warps, types=wide)
        if not pdl:
            yield Build(constants, _ALL, tile.warps)


BUILDS: dict[str, list[Build]] = {
    "rms_norm_kernel": [
        Build(dict(PDL=False, SIZE=576, BLOCK=1024), _ALL, 2),
        *(
            Build(dict(PDL=pdl, SIZE=4096, BLOCK=4096), num_warps=8, types=(("x", "*fp32"),))
            for pdl in (False, True)
        ),
    ],
    "add_rms_norm_kernel": [
        Build(dict(SIZE=576, BLOCK=1024), _ALL, 2),
        Build(dict(SIZE=4096, BLOCK=4096), num_warps=8, types=(("residual", "*fp32"),)),
        Build(dict(SIZE=4096, BLOCK=4096), num_warps=8, types=(("x", "*fp32"), ("residual", "*fp32"))),
    ],
    "add_partials_rms_norm_kernel": [
        Build(
            dict(SIZE=4096, BLOCK=4096, SPLITS=splits, PDL=pdl), num_warps=8, types=(("residual", "*fp32"),)
        )
        for splits, pdl in ((1, False), (4, False), (4, True))
    ],
    "few_rows_kernel": list(_few_rows()),
    "norm_linear_kernel": [*_small(GATED=False), *_small(GATED=True)],
    "linear_add_kernel": list(_small()),
    "embed_rms_norm_kernel": [Build(dict(SIZE=4096, BLOCK=4096), _ALL, 8, types=(("residual", "*fp32"),))],
    "silu_and_mul_kernel": [Build(dict(BLOCK=1024), _ALL)],
    "rope_store_kv_kernel": [
        Build(
            dict(NUM_HEADS=32, NUM_KV_HEADS=8, HALF=64, STORE=store, PDL=store, BLOCK_H=8, BLOCK_D=64),
            _ALL,
            num_warps=2,
        )
        for store in (False, True)
    ],
    "prefill_attention_kernel": [
        *(Build(_attention(WINDOWED=w, BLOCK_R=64, BLOCK_S=64), _HALVES) for w in (False, True)),
        Build(_attention(WINDOWED=False, BLOCK_R=64, BLOCK_S=32), ("fp32",)),
    ],
    "tree_attention_kernel": list(_trees()),
    "combine_kernel": [
        Build(dict(DIM=128, BLOCK_SPLITS=64, CHUNK=32, BLOCK_D=128, PDL=pdl)) for pdl in (False, True)
    ],
    "tree_attention_invariant_kernel": [
        Build(_attention(WINDOWED=w, STRETCH=512, BLOCK_R=16, BLOCK_S=64), _HALVES) for w in (False, True)
    ]
    + [Build(_attention(WINDOWED=False, STRETCH=512, BLOCK_R=16, BLOCK_S=32), ("fp32",))],
    "combine_invariant_kernel": [Build(dict(NUM_HEADS=32, DIM=128, STRETCH=512, BLOCK_D=128), num_warps=1)],
    "sample_kernel": [
        Build(dict(BLOCK=4096, PARTS=16, BY_SLOT=by_slot), ("fp32",), 8, types=(("out", "*i64"),))
        for by_slot in (True, False)
    ],
    "sample_best_kernel": [Build(dict(BLOCK=4096), ("fp32",))],
    "read_slots_kernel": [
        Build(dict(BLOCK=1024), _ALL, types=(("table", "*i32"), ("indices32", "*i32"))),
    ],
    "place_nodes_kernel": [Build(dict(BLOCK_N=n), num_warps=1, types=(("table", "*i32"),)) for n in (16, 64)],
    "accept_kernel": [
        Build(dict(BLOCK_N=n, BLOCK_W=16), num_warps=w, types=(("failed", "*i1"),))
        for n, w in ((16, 1), (64, 4))
    ],
    "commit_kernel": [Build(dict(BLOCK_W=16), num_warps=1, types=(("table", "*i32"),))],
    "keep_aux_kernel": [Build(dict(BLOCK=1024), _ALL)],
    "candidate_scan_kernel": [
        Build(dict(BLOCK=64, COUNT=32, DRAWN=drawn, MAPPED=mapped), dtypes)
        for drawn, mapped, dtypes in ((False, False, _ALL), (True, False, _ALL), (True, True, ("bf16",)))
    ],
    "linear_scan_kernel": [
        Build(
            dict(RANK=96, DRAWN=drawn, MAPPED=mapped, BLOCK=64, BLOCK_V=128, BLOCK_K=128, BLOCK_T=t, PDL=pdl),
            dtypes,
            4 if t <= 16 else 8,
            types=(("scores", "data"),),
        )
        for drawn, mapped, t, pdl, dtypes in (
            (False, False, 8, True, _HALVES),
            (False, False, 8, False, _ALL),
            (True, False, 8, True, _HALVES[:1]),
            (False, False, 64, True, _HALVES[:1]),
            (True, False, 64, False, _HALVES[:1]),
            (True, True, 16, False, _HALVES[:1]),
        )
    ],
    "candidate_select_kernel": [
        Build(
            dict(BLOCK=64, BLOCKS=2048, KEPT=64, PARTIAL=64, SHORT=short, DRAWN=drawn, MAPPED=mapped),
            dtypes,
            8,
        )
        for short, dtypes in ((True, ("bf16",)), (False, ("fp16", "fp32")))
        for drawn, mapped in ((False, False), (True, False), (True, True))
    ],
    "row_dots_kernel": [
        Build(dict(SIZE=size, BLOCK_H=block), _ALL, types=(("out", "*fp32"),))
        for size, block in ((576, 1024), (4096, 4096), (5120, 4096))
    ],
    "draft_rows_kernel": [
        Build(dict(BLOCK=128), types=(("k", "i32"), ("lanes", "i32"), ("root_positions", "*i64")))
    ],
    "draft_input_kernel": [
        Build(dict(PARENTS=p, NORMED=n, SIZE=4096, BLOCK=4096), _ALL, 8, types=(("k", "i32"),))
        for p, n in ((False, False), (True, False), (True, True))
    ],
    "grow_tree_kernel": [
        Build(dict(BLOCK_R=rows, BLOCK_C=64, DRAWN=drawn), num_warps=warps, types=(("k", "i32"),))
        for rows, drawn, warps in ((4, False, 1), (16, False, 4), (4, True, 4), (16, True, 4))
    ],
    "build_tree_kernel": [
        Build(dict(COUNT=count, BLOCK_N=n), types=(("nan", "*i1"),))
        for count, n in ((128, 16), (256, 16), (1024, 64), (8192, 64))
    ],
    "move_kv_kernel": [Build(dict(GROUP=g, BLOCK_M=16, BLOCK_E=256)) for g in (9, 16)],
    "linear_invariant_kernel": [
        Build(dict(HAS_BIAS=b, BLOCK_M=16, BLOCK_N=64, BLOCK_K=64), _ALL, num_stages=3) for b in (False, True)
    ],
}
# These wait first and are the same otherwise, so one of each is enough with PDL.
for _name in (
    *("sample_kernel", "sample_best_kernel", "draft_rows_kernel", "draft_input_kernel", "grow_tree_kernel"),
    *("read_slots_kernel", "place_nodes_kernel", "accept_kernel", "commit_kernel", "keep_aux_kernel"),
    *("candidate_scan_kernel", "candidate_select_kernel", "row_dots_kernel"),
    "build_tree_kernel",
):
    _plain = [replace(each, constants=each.constants | {"PDL": False}) for each in BUILDS[_name]]
    _early = replace(_plain[0], constants=_plain[0].constants | {"PDL": True}, dtypes=_plain[0].dtypes[:1])
    BUILDS[_name] = [*_plain, _early]


def kernels() -> dict[str, JITFunction]:
    """Every kernel of tokenspeed.kernels.triton: the compiled functions whose names end in _kernel."""
    found = {}
    for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        for name, value in vars(importlib.import_module(info.name)).items():
            if name.endswith("_kernel") and isinstance(value, JITFunction):
                found[name] = value
    return found
