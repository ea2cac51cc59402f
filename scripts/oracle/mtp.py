"""The MTP layer, which transformers leaves out, composed from its decoder layer.

No cache: a later pass runs the whole sequence again, with the rows of the passes before behind
those of the first one.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaRMSNorm

from scripts.oracle.model import load_dequantised, load_tensors, mtp_prefix, read_dequantised

OWN = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")


class FirstPass(NamedTuple):
    """The first pass over T tokens."""

    merged: torch.Tensor  # [T, D], the layer's input
    y: torch.Tensor  # [T, D], after the layer's own norm
    topk: torch.Tensor  # [T, K]; the first rows have keys of the future among them


@dataclass
class Mtp:
    """The MTP layer of one model, in float32.

    Attributes:
        model: a model whose last layer is the MTP layer; embedding, rotation and head are its own.
        embed_norm: of the next token's embedding.
        hidden_norm: of the hidden state.
        merge: [D, 2D], for [embedding, hidden].
        norm: behind the layer.
    """

    model: GlmMoeDsaForCausalLM
    embed_norm: GlmMoeDsaRMSNorm
    hidden_norm: GlmMoeDsaRMSNorm
    merge: torch.Tensor
    norm: GlmMoeDsaRMSNorm

    @property
    def layer(self) -> torch.nn.Module:
        """The decoder layer."""
        return self.model.model.layers[-1]

    def head(self, y: torch.Tensor) -> torch.Tensor:
        """Return the logits of rows."""
        return self.model.lm_head(y)

    def first_pass(self, hidden: torch.Tensor, next_tokens: torch.Tensor) -> FirstPass:
        """Run over a sequence from its first token on; `hidden` is behind the target's norm."""
        embedded = self.model.model.embed_tokens(next_tokens)
        embedded[0] = 0
        merged = self._merged(embedded, hidden)
        x, topk = self._run(merged, None)
        return FirstPass(merged, self.norm(x), topk)

    def draft(
        self, first: FirstPass, row: int, steps: int, *, share: bool
    ) -> tuple[list[int], np.ndarray]:
        """Draft greedily behind a row.

        Args:
            first: the first pass; rows after `row` play no part.
            row: the last verified row.
            steps: drafts.
            share: later passes attend to what `row` selected, else each runs the indexer.

        Returns:
            The tokens, and the logits [steps, V] they are the best of.
        """
        merged, y = first.merged[: row + 1], first.y[row]
        # The first rows have keys of their future among them, which the causal mask takes out.
        topk = first.topk[: row + 1].clamp(max=row)
        tokens, logits = [], [self.head(y)]
        while True:
            tokens.append(int(logits[-1].argmax()))
            if len(tokens) == steps:
                return tokens, torch.stack(logits).numpy()
            embedded = self.model.model.embed_tokens(torch.tensor(tokens[-1:]))
            merged = torch.cat([merged, self._merged(embedded, y[None])])
            topk = torch.cat([topk, topk[row : row + 1]])
            x, _ = self._run(merged, topk if share else None)
            y = self.norm(x[-1])
            logits.append(self.head(y))

    def _merged(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        halves = [self.embed_norm(embedded), self.hidden_norm(hidden)]
        return torch.cat(halves, dim=-1) @ self.merge.T

    def _run(
        self, merged: torch.Tensor, topk: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer over a sequence, with a given selection or the layer's own."""
        rows = len(merged)
        positions = torch.arange(rows)[None]
        mask = torch.full((rows, rows), torch.finfo(merged.dtype).min).triu(1)
        attention = self.layer.self_attn
        indexer = attention.indexer
        if topk is not None:
            attention.indexer = None  # what a shared layer has
        x, chosen = self.layer(
            merged[None],
            attention_mask=mask[None, None],
            position_ids=positions,
            position_embeddings=self.model.model.rotary_emb(merged, position_ids=positions),
            prev_topk_indices=None if topk is None else topk[None],
        )
        attention.indexer = indexer
        return x[0], chosen[0]


def load_mtp(folder: Path) -> tuple[GlmMoeDsaForCausalLM, Mtp]:
    """Load a checkpoint's target model, and its MTP layer as the last layer of a longer model."""
    config, tensors = read_dequantised(folder)
    prefix = mtp_prefix(config)
    own = {name: tensors.pop(prefix + name) for name in OWN}
    longer = {
        **{key: value for key, value in config.items() if key != "layer_types"},
        "num_hidden_layers": config["num_hidden_layers"] + 1,
        "mlp_layer_types": [*config["mlp_layer_types"], "sparse"],
        "indexer_types": [*config["indexer_types"], "full"],
    }

    def norm(name: str) -> GlmMoeDsaRMSNorm:
        module = GlmMoeDsaRMSNorm(config["hidden_size"], config["rms_norm_eps"])
        module.weight = torch.nn.Parameter(own[name], requires_grad=False)
        return module

    mtp = Mtp(
        load_tensors(longer, tensors),
        norm("enorm.weight"),
        norm("hnorm.weight"),
        own["eh_proj.weight"],
        norm("shared_head.norm.weight"),
    )
    return load_dequantised(folder), mtp
