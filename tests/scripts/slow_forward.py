"""The plainest form of the training loss: no folding, no blocks, every expert on every row."""

import jax
import jax.numpy as jnp

from scripts.tiny.loss import DRAFT_STEP_WEIGHTS, DRAFT_WEIGHT, EXTRA_TOKENS, INDEX_WEIGHT


def rms(x, scale, eps):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def rope(x, positions, theta):
    """Interleaved pairs, in place; x [batch, T, heads, B]."""
    width = x.shape[-1]
    angle = positions[:, None, None] * theta ** (-jnp.arange(0, width, 2) / width)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * jnp.exp(1j * angle)
    return jnp.stack([turned.real, turned.imag], -1).reshape(x.shape)


class SlowModel:
    """Forward from parameters under their flat names."""

    def __init__(self, shape, parameters, bias, selects):
        self.shape, self.parameters, self.bias, self.selects = shape, parameters, bias, selects
        self.targets = []  # (target attention, log of index softmax, allowed) per full layer

    def weight(self, layer, name):
        return self.parameters[f"layers.{layer}.{name}"]

    def layer(self, layer, x, positions, selected, keys=None):
        shape = self.shape
        h = rms(x, self.weight(layer, "input_norm"), shape.rms_norm_eps)
        latent = rms(
            h @ self.weight(layer, "attention.q_a"),
            self.weight(layer, "attention.q_a_norm"),
            shape.rms_norm_eps,
        )
        causal = jnp.tril(jnp.ones((h.shape[1], h.shape[1]), bool))[None]
        if keys is None and shape.has_indexer(layer):
            scores = self.index_scores(layer, latent, h, positions)
            if self.selects:
                masked = jnp.where(causal, scores, -jnp.inf)
                kth = jax.lax.top_k(jax.lax.stop_gradient(masked), shape.index_topk)[0][..., -1:]
                selected = jax.lax.stop_gradient(masked) >= kth
            allowed = causal if selected is None else causal & selected
            logs = jax.nn.log_softmax(jnp.where(allowed, scores, -1e30))
            self.targets.append(([], logs))
        own = self.keys(layer, h, positions) if keys is None else keys
        allowed = causal if selected is None else causal & selected
        output, attention = self.attend(layer, latent, own, positions, allowed)
        if keys is None:
            self.targets[-1][0].append(jax.lax.stop_gradient(attention.mean(1)))
        y = x + output @ self.weight(layer, "attention.o")
        return y + self.feed_forward(layer, y), selected, own

    def index_scores(self, layer, latent, h, positions):
        shape = self.shape
        latent, h = jax.lax.stop_gradient((latent, h))
        k = h @ self.weight(layer, "indexer.key")
        k = (k - k.mean(-1, keepdims=True)) / jnp.sqrt(k.var(-1, keepdims=True) + 1e-6)
        scale = self.weight(layer, "indexer.key_norm_scale")
        k = k * scale + self.weight(layer, "indexer.key_norm_bias")
        q = latent @ self.weight(layer, "indexer.query")
        q = q.reshape(*q.shape[:2], shape.index_n_heads, shape.index_head_dim)
        front = shape.qk_rope_head_dim
        q = jnp.concatenate([rope(q[..., :front], positions, shape.rope_theta), q[..., front:]], -1)
        k = k[:, :, None]
        k = jnp.concatenate([rope(k[..., :front], positions, shape.rope_theta), k[..., front:]], -1)
        weights = h @ self.weight(layer, "indexer.head_weight") * shape.index_n_heads**-0.5
        dots = jnp.einsum("btmi,bsi->btms", q, k[:, :, 0]) * shape.index_head_dim**-0.5
        return jnp.einsum("btms,btm->bts", jax.nn.relu(dots), weights)

    def keys(self, layer, h, positions):
        shape = self.shape
        both = h @ self.weight(layer, "attention.kv_a")
        latent = rms(
            both[..., : shape.kv_lora_rank],
            self.weight(layer, "attention.kv_a_norm"),
            shape.rms_norm_eps,
        )
        nope = jnp.einsum("btc,hac->btha", latent, self.weight(layer, "attention.k_up"))
        turned = rope(both[:, :, None, shape.kv_lora_rank :], positions, shape.rope_theta)
        shared = jnp.broadcast_to(turned, (*nope.shape[:3], shape.qk_rope_head_dim))
        value = jnp.einsum("btc,hcu->bthu", latent, self.weight(layer, "attention.v_up"))
        return jnp.concatenate([nope, shared], -1), value

    def attend(self, layer, latent, keys, positions, allowed):
        shape = self.shape
        q = (latent @ self.weight(layer, "attention.q_b")).reshape(
            *latent.shape[:2], shape.num_attention_heads, shape.qk_head_dim
        )
        nope, turned = jnp.split(q, [shape.qk_nope_head_dim], -1)
        q = jnp.concatenate([nope, rope(turned, positions, shape.rope_theta)], -1)
        scores = jnp.einsum("bthk,bshk->bhts", q, keys[0]) * shape.qk_head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(allowed[:, None], scores, -1e30))
        output = jnp.einsum("bhts,bshu->bthu", weights, keys[1])
        return output.reshape(*output.shape[:2], -1), weights

    def feed_forward(self, layer, x):
        shape = self.shape
        h = rms(x, self.weight(layer, "post_norm"), shape.rms_norm_eps)
        if shape.is_dense(layer):
            return mlp(h, self.weight(layer, "mlp.gate_up"), self.weight(layer, "mlp.down"))
        scores = jax.nn.sigmoid(h @ self.weight(layer, "moe.router"))
        biased = jax.lax.stop_gradient(scores) + self.bias[shape.sparse_layers.index(layer)]
        kth = jax.lax.top_k(biased, shape.num_experts_per_tok)[0][..., -1:]
        gates = jnp.where(biased >= kth, scores, 0.0)
        gates = gates / gates.sum(-1, keepdims=True) * shape.routed_scaling_factor
        total = mlp(
            h, self.weight(layer, "moe.shared_gate_up"), self.weight(layer, "moe.shared_down")
        )
        for expert in range(shape.n_routed_experts):
            gate_up = self.weight(layer, "moe.gate_up")[expert]
            down = self.weight(layer, "moe.down")[expert]
            total = total + gates[..., expert : expert + 1] * mlp(h, gate_up, down)
        return total


def mlp(x, gate_up, down):
    gate, up = jnp.split(x @ gate_up, 2, -1)
    return (gate * jax.nn.sigmoid(gate) * up) @ down


def slow_loss(parameters, bias, batch, shape, *, selects, row_stride, draft_steps):
    """The same number as `training_loss`, where no expert overflows."""
    model = SlowModel(shape, parameters, bias, selects)
    tokens, weights = batch
    count = tokens.shape[1] - EXTRA_TOKENS
    x, selected = parameters["embed"][tokens[:, :count]], None
    for layer in range(shape.num_hidden_layers):
        x, selected, _ = model.layer(layer, x, jnp.arange(count), selected)
    hidden = rms(x, parameters["norm"], shape.rms_norm_eps)

    def error(state, ahead):
        logs = jax.nn.log_softmax(state @ parameters["head"].T)
        goal = tokens[:, ahead : ahead + count]
        losses = -jnp.take_along_axis(logs, goal[..., None], -1)[..., 0]
        weight = weights[:, ahead : ahead + count]
        return (losses * weight).sum() / weight.sum()

    total, recycled, selected, keys = error(hidden, 1), hidden, None, None
    for step in range(draft_steps):
        embedded = parameters["embed"][tokens[:, step + 1 : step + 1 + count]]
        both = [
            rms(embedded, parameters["mtp.embed_norm"], shape.rms_norm_eps),
            rms(recycled, parameters["mtp.hidden_norm"], shape.rms_norm_eps),
        ]
        merged = jnp.concatenate(both, -1) @ parameters["mtp.merge"]
        x, selected, keys = model.layer(
            shape.num_hidden_layers, merged, jnp.arange(count) + step, selected, keys
        )
        recycled = rms(x, parameters["mtp.norm"], shape.rms_norm_eps)
        total = total + DRAFT_WEIGHT * DRAFT_STEP_WEIGHTS[step] * error(recycled, step + 2)
    rows = slice(row_stride - 1, None, row_stride)
    divergences = []
    for attention, logs in model.targets:
        target = (sum(attention) / len(attention))[:, rows]
        terms = jnp.where(target > 0, target * (jnp.log(target + 1e-20) - logs[:, rows]), 0.0)
        divergences.append(terms.sum(-1).mean())
    return total + INDEX_WEIGHT * sum(divergences) / len(divergences)
