"""The training loss: next token, drafts of the MTP layer, and the indexer's imitation."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from scripts.tiny.attention import MASKED
from scripts.tiny.guide import guide_loss
from scripts.tiny.indexer import index_scores
from scripts.tiny.parameters import Parameters
from scripts.tiny.shape import TinyShape
from scripts.tiny.transformer import IndexGroup, Mode, run_drafts, run_trunk

DRAFT_STEP_WEIGHTS = (1.0, 0.6, 0.4)
DRAFT_WEIGHT = 0.3
INDEX_WEIGHT = 1.0
GUIDE_WEIGHT = 0.2
# Tokens read beyond a row: the target of the third draft of the last position is 4 further.
EXTRA_TOKENS = 4


class Batch(NamedTuple):
    """Training rows, EXTRA_TOKENS longer than the positions that are trained.

    `weights[b, i]` is the weight of predicting `tokens[b, i]`: 0 for what nobody can predict, 1 for
    plain text, above 1 for what has to be recalled from earlier in the row.
    """

    tokens: Int[Array | np.ndarray, "batch T_plus"]
    weights: Float[Array | np.ndarray, "batch T_plus"]


@dataclasses.dataclass(frozen=True)
class Objective:
    """Static part of a phase: how the forward runs and how many chained drafts are trained."""

    mode: Mode
    draft_steps: int


def training_loss(
    parameters: Parameters,
    bias: Float[Array, "sparse E"],
    batch: Batch,
    shape: TinyShape,
    objective: Objective,
) -> tuple[Float[Array, ""], tuple[dict[str, Float[Array, ""]], Float[Array, "sparse E"]]]:
    """Return the loss, and (metrics, load of every expert) beside it."""
    tokens, weights = jnp.asarray(batch.tokens), jnp.asarray(batch.weights)
    count = tokens.shape[1] - EXTRA_TOKENS
    mode = objective.mode
    trunk = run_trunk(shape, parameters, bias, tokens[:, :count], mode)
    losses = token_losses(parameters["head"], trunk.hidden, tokens[:, 1 : count + 1])
    main = weighted_mean(losses, weights[:, 1 : count + 1])
    metrics = {"lm": main} | split_losses(losses, weights[:, 1 : count + 1])
    drafts = run_drafts(
        shape, parameters, bias[-1], trunk.hidden, tokens, mode, steps=objective.draft_steps
    )
    total = main
    for step, hidden in enumerate(drafts.hidden):
        targets = slice(step + 2, count + step + 2)
        error = weighted_mean(
            token_losses(parameters["head"], hidden, tokens[:, targets]), weights[:, targets]
        )
        metrics[f"mtp{step + 1}"] = error
        total = total + DRAFT_WEIGHT * DRAFT_STEP_WEIGHTS[step] * error
    if mode.row_stride is not None:
        divergence = index_divergence(trunk.groups + drafts.groups, mode.row_stride)
        metrics["kl"] = divergence
        total = total + INDEX_WEIGHT * divergence
    if mode.guided:
        surprise = guide_loss(tokens[:, : count + 1], trunk.guided)
        metrics["guide"] = surprise
        total = total + GUIDE_WEIGHT * surprise
    metrics["drop"] = trunk.drop
    return total, (metrics, jnp.stack([*trunk.loads, drafts.load]))


def weighted_mean(
    values: Float[Array, "batch T"], weights: Float[Array, "batch T"]
) -> Float[Array, ""]:
    """Return the mean under weights (not all zero)."""
    return (values * weights).sum() / weights.sum()


def split_losses(
    losses: Float[Array, "batch T"], weights: Float[Array, "batch T"]
) -> dict[str, Float[Array, ""]]:
    """Return the mean over plain text and over recalled tokens, apart."""
    text = (weights == 1.0).astype(losses.dtype)
    recall = (weights > 1.0).astype(losses.dtype)
    return {
        "text": (losses * text).sum() / jnp.maximum(text.sum(), 1.0),
        "recall": (losses * recall).sum() / jnp.maximum(recall.sum(), 1.0),
        "recalled": recall.sum(),
    }


def token_losses(
    head: Float[Array, "V D"], hidden: Float[Array, "batch T D"], targets: Int[Array, "batch T"]
) -> Float[Array, "batch T"]:
    """Return the cross entropy of every target, in nats."""
    logits = hidden.reshape(-1, hidden.shape[-1]) @ head.T
    return cross_entropy(logits, targets.reshape(-1)).reshape(targets.shape)


@jax.custom_vjp
def cross_entropy(logits: Float[Array, "N V"], targets: Int[Array, " N"]) -> Float[Array, " N"]:
    """Return log sum exp minus the target's logit; the gradient recomputes the softmax."""
    largest = logits.max(-1)
    log_sum = jnp.log(jnp.exp(logits - largest[:, None]).sum(-1)) + largest
    return log_sum - jnp.take_along_axis(logits, targets[:, None], -1)[:, 0]


def _cross_entropy_forward(logits, targets):  # noqa: ANN001, ANN202
    return cross_entropy(logits, targets), (logits, targets)


def _cross_entropy_backward(saved, gradient):  # noqa: ANN001, ANN202
    logits, targets = saved
    exponent = jnp.exp(logits - logits.max(-1, keepdims=True))
    softmax = exponent * (1 / exponent.sum(-1, keepdims=True))
    hit = targets[:, None] == jnp.arange(logits.shape[-1])
    return (softmax - hit) * gradient[:, None], None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def index_divergence(groups: tuple[IndexGroup, ...], row_stride: int) -> Float[Array, ""]:
    """Return KL(attention || softmax of index scores), mean over rows and full layers.

    The target is the mean attention over heads and over the layers that share the selection. Where
    a selection was used, only selected keys count.
    """
    total = jnp.zeros(())
    for inputs, attention, selected in groups:
        target = sum(attention) / len(attention)
        scores = index_scores(inputs)
        count = inputs.keys.shape[1]
        rows = jnp.arange(row_stride - 1, count, row_stride)
        allowed = (rows[:, None] >= jnp.arange(count))[None]
        if selected is not None:
            allowed = allowed & selected[:, row_stride - 1 :: row_stride]
        log_chosen = jax.nn.log_softmax(jnp.where(allowed, scores, MASKED))
        terms = jnp.where(target > 0, target * (jnp.log(target + 1e-20) - log_chosen), 0.0)
        total = total + terms.sum(-1).mean()
    return total / len(groups)
