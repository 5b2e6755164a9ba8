"""The target as a teacher: reads packed texts in one pass and gives its states after every token."""

from pathlib import Path

import torch
from torch import Tensor

from tokenspeed.attention.base import PrefillRows
from tokenspeed.attention.kv_pool import KvPool
from tokenspeed.attention.select import Backend
from tokenspeed.layers.rotary import rope_table
from tokenspeed.models.config import ModelConfig
from tokenspeed.models.decoder import Decoder
from tokenspeed.models.weights import Progress, load_model
from tokenspeed.train.packing import PAGE, Batch, Shape


class Inputs:
    """A batch in memory that stays where it is, as a captured step needs it."""

    def __init__(self, shape: Shape, device: torch.device):
        rows = (shape.num_rows, shape.length)
        self.shape, self.device = shape, device
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.begins = torch.zeros_like(self.tokens)
        self.cu_rows = torch.zeros(shape.num_texts + 1, dtype=torch.int32, device=device)
        self.starts = torch.zeros(shape.num_rows, shape.num_starts, dtype=torch.int64, device=device)
        self.counts = torch.zeros_like(self.starts)
        self.temperatures = torch.zeros(self.starts.shape, device=device)
        # A GPU takes the texts' places from `cu_rows`, and from here only bounds.
        self.chunks = [(0, shape.length)] * shape.num_texts

    def load(self, batch: Batch) -> None:
        """Copies `batch`, in the order of the device's stream."""
        for name, array in batch._asdict().items():
            source = torch.from_numpy(array)
            if self.device.type == "cuda":
                source = source.pin_memory()
            getattr(self, name).copy_(source, non_blocking=True)
        if self.device.type == "cpu":
            sizes = (batch.cu_rows[1:] - batch.cu_rows[:-1]).tolist()
            self.chunks = [(0, size) for size in sizes if size]


class Target:
    """A model that is only read from.

    Args:
        model: loaded. shape: of the batches. aux_layers: whose states the draft is fed.
    """

    def __init__(self, model: Decoder, shape: Shape, aux_layers: tuple[int, ...]):
        self.model, self.aux_layers = model, aux_layers
        config, place = model.config, model.place
        table = rope_table(config.rope, config.head_dim, shape.length, place.device)
        self._backend = Backend(place.device, False, table, config.windows, config.head_dim**-0.5)
        self._pool = KvPool(
            config.num_layers,
            shape.num_tokens // PAGE,
            PAGE,
            config.num_kv_heads,
            config.head_dim,
            place.dtype,
            place.device,
        )
        self._columns = torch.arange(shape.length, device=place.device)
        self._slots = torch.arange(shape.num_tokens, device=place.device)
        self._pages = torch.arange(shape.length // PAGE, device=place.device)

    @property
    def head(self) -> Tensor:
        """[V, H] rows of lm_head, in the model's dtype."""
        return self.model.head.table.weight

    @property
    def embedding(self) -> Tensor:
        """[V, H], in the model's dtype."""
        return self.model.embedding.table.weight

    @torch.no_grad()
    def read(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """States after each token: hidden [B, L, H] after the final norm, aux [B, L, A]. No host sync."""
        rows = inputs.tokens.shape
        first = inputs.cu_rows[:-1]
        pages = (first[:, None] // PAGE + self._pages).clamp(max=self._pool.num_pages - 1)
        chunks = len(inputs.chunks)
        prefill = PrefillRows(
            positions=(self._columns - inputs.begins).flatten(),
            slots=self._slots,
            block_table=pages[:chunks].to(torch.int32),
            starts=torch.zeros_like(first[:chunks]),
            cu_rows=inputs.cu_rows[: chunks + 1],
            chunks=inputs.chunks,
        )
        attention = self._backend.prefill(self._pool, prefill)
        hidden, aux = self.model.forward(
            inputs.tokens.flatten(), prefill.positions, attention, self.aux_layers
        )
        return hidden.view(*rows, -1), aux.view(*rows, -1)


def load_target(
    model_dir: Path, config: ModelConfig, device: torch.device, progress: Progress | None = None
) -> Decoder:
    """The model, in bfloat16 on a GPU and in float32 on a CPU. Raises ConfigError as load_model does."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return load_model(model_dir, config, device, dtype, progress=progress)
