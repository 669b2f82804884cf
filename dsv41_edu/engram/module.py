"""One layer's memory whole: its table, in memory or on disk, and the gate that adds what was read."""

from torch import Tensor, nn

from dsv41_edu.config import ModelConfig
from dsv41_edu.engram.gate import EngramGate
from dsv41_edu.engram.table import EngramTable


class Engram(EngramGate):
    """`embed` [rows, width], a trained or loaded table in memory, or `table`, rows read as they are stored."""

    def __init__(self, config: ModelConfig, layer: int, table: EngramTable | None = None):
        """Raises ValueError for a table of another shape than the config's."""
        c = config
        columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads
        super().__init__(c.hc_mult, c.hidden_size, columns * c.engram_head_dim, c.rms_norm_eps)
        rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
        if table is not None and (table.rows, table.width) != (rows, c.engram_head_dim):
            raise ValueError(
                f"table of {table.rows} rows of {table.width}: expected {rows} of {c.engram_head_dim}, layer {layer}"
            )
        self.table = table
        self.embed = nn.Embedding(rows, c.engram_head_dim) if table is None else None
        self.dropout = nn.Dropout(0.0)

    def read(self, rows: Tensor) -> Tensor:
        """Values [..., columns * width] of row ids, int64 [..., columns], in the projection's dtype."""
        values = self.embed(rows) if self.table is None else self.table.read(rows.cpu())
        return self.dropout(values.to(self.wkv.weight).flatten(-2))

    def forward(self, streams: Tensor, rows: Tensor, text_mask: Tensor | None = None) -> Tensor:
        """Streams [..., n, d] with the memory of rows, int64 [..., columns], added; as `add_memory`."""
        return super().forward(streams, self.read(rows), text_mask)
