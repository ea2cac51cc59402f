"""Loads a checkpoint into transformers in float32, and watches what its forward selects."""

import json
import tempfile
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch.overrides import TorchFunctionMode
from transformers import GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

BLOCK = 128


# For exact references: plain loops and matrix products, in any width.
PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}


def load(folder: Path, implementation: dict[str, str] = PLAIN) -> GlmMoeDsaForCausalLM:
    """Load a BF16 or F32 checkpoint exactly: nothing missing, nothing left over."""
    model, info = GlmMoeDsaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **implementation
    )
    problems = {key: sorted(names) for key, names in info.items() if names}
    assert not problems, f"transformers did not load the checkpoint as it is: {problems}"
    return model.eval()


def load_dequantised(folder: Path, implementation: dict[str, str] = PLAIN) -> GlmMoeDsaForCausalLM:
    """Load a checkpoint that may be block FP8 and may have an MTP layer, which is left out."""
    config, tensors = read_dequantised(folder)
    mtp = mtp_prefix(config)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(mtp)}
    return load_tensors(config, kept, implementation)


def read_dequantised(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the parsed config without its quantisation, and every tensor in float32."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors.torch.load_file(file)
    plain = {
        name: dequantise(tensor, tensors.get(f"{name}_scale_inv"))
        for name, tensor in tensors.items()
        if not name.endswith("_scale_inv")
    }
    return config, plain


def mtp_prefix(config: dict[str, Any]) -> str:
    """Return what the names of the MTP layer's tensors start with."""
    return f"model.layers.{config['num_hidden_layers']}."


def load_tensors(
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    implementation: dict[str, str] = PLAIN,
) -> GlmMoeDsaForCausalLM:
    """Load a model from a parsed config and its tensors, as `load` does."""
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary)
        (target / "config.json").write_text(json.dumps(config))
        safetensors.torch.save_file(
            tensors, target / "model.safetensors", metadata={"format": "pt"}
        )
        return load(target, implementation)


def dequantise(tensor: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return float32 values; one scale for each block of 128 x 128, the last ones partial."""
    values = tensor.float()
    if scale is None:
        return values
    rows, columns = values.shape
    spread = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return values * spread


@dataclass
class Trace:
    """What forwards selected, per layer, and by how much.

    Attributes:
        selected: bool [T, T] (row, key) of each layer, causal.
        index_margin: float [T] of each full layer; inf where every key fits.
        index_relative: the same, in units of the row's best score.
        router_margin: float [T] of each sparse layer.
    """

    selected: list[np.ndarray] = field(default_factory=list)
    index_margin: list[np.ndarray] = field(default_factory=list)
    index_relative: list[np.ndarray] = field(default_factory=list)
    router_margin: list[np.ndarray] = field(default_factory=list)


class TopkMargins(TorchFunctionMode):
    """Watches calls of topk and measures the distance between the k-th and the next value."""

    def __init__(self) -> None:
        super().__init__()
        self.margins: list[torch.Tensor] = []
        self.best: list[torch.Tensor] = []
        # The router's choices are the topk with sorted=False; its other one sums a group's best two
        # scores, which is continuous and decides nothing.
        self.unsorted_only = False

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run the function; note the margin of every selection."""
        kwargs = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk):
            values = args[0]
            k = args[1] if len(args) > 1 else kwargs["k"]
            decides = kwargs.get("sorted") is False or not self.unsorted_only
            if k < values.shape[-1] and decides:
                ordered = values.sort(dim=-1, descending=True).values
                margin = ordered[..., k - 1] - ordered[..., k]
                # A masked rival (the mask is finfo.min, or -inf): nothing was decided.
                self.margins.append(margin.where(ordered[..., k] > -1e30, torch.inf).flatten())
                self.best.append(ordered[..., 0].abs().flatten())
        return func(*args, **kwargs)


@contextmanager
def traced(layers: Iterable[torch.nn.Module]) -> Generator[Trace]:
    """Collect a Trace from forwards of one sequence through these layers inside the context."""
    trace = Trace()
    watch = TopkMargins()

    def watch_module(module: torch.nn.Module, *_inputs: Any) -> None:
        watch.margins.clear()
        watch.best.clear()
        watch.unsorted_only = not isinstance(module, GlmMoeDsaIndexer)

    def note_indexer(*_call: Any) -> None:
        (margin,), (best,) = watch.margins, watch.best
        trace.index_margin.append(margin.numpy())
        trace.index_relative.append((margin / best).numpy())

    def note_router(*_call: Any) -> None:
        # One group: no choice between groups was watched.
        trace.router_margin.append(torch.stack(watch.margins).min(dim=0).values.numpy())

    def note_attention(_module: torch.nn.Module, _inputs: Any, output: tuple) -> None:
        rows = output[2].shape[1]
        mask = torch.zeros(rows, rows, dtype=torch.bool)
        mask.scatter_(1, output[2][0].long(), True)
        trace.selected.append(mask.tril().numpy())

    handles = []
    for layer in layers:
        handles.append(layer.self_attn.register_forward_hook(note_attention))
        if layer.self_attn.indexer is not None:
            handles.append(layer.self_attn.indexer.register_forward_pre_hook(watch_module))
            handles.append(layer.self_attn.indexer.register_forward_hook(note_indexer))
        if hasattr(layer.mlp, "gate"):
            handles.append(layer.mlp.gate.register_forward_pre_hook(watch_module))
            handles.append(layer.mlp.gate.register_forward_hook(note_router))
    try:
        with watch:
            yield trace
    finally:
        for handle in handles:
            handle.remove()
