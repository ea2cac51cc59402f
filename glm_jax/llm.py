"""Offline API: load a model, generate for many prompts at once, stream, read logits."""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from bucketing.programs import CompileReport, ProgramTable
from glm_jax.compilation_cache import compile_service
from glm_jax.device_memory import check_pool, engine_budget, fit_pool
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.engine import Engine
from glm_jax.engine.executor import Executor
from glm_jax.engine.lowering import Lowering
from glm_jax.engine.outputs import RequestOutput, StreamDelta
from glm_jax.engine.runner import Runner
from glm_jax.engine.warm_order import warm_order
from glm_jax.engine_options import resolve_options
from glm_jax.measurements import Measurements
from glm_jax.model.transformer import Transformer
from glm_jax.model_files import ModelFiles, find_model, load_model
from glm_jax.observe.log_header import header_now
from glm_jax.observe.observer import Observer
from glm_jax.observe.recorder import Recorder
from glm_jax.observe.step_log import StepLog
from glm_jax.progress import compiling_bar, loading_bar, program_name
from glm_jax.sampling.params import SamplingParams, check_names
from glm_jax.tokenizer import Tokenizer

Prompt = str | Sequence[int]

# Options of ``LLM``: those of the engine that make sense offline.
OPTIONS = frozenset(EngineConfig.__dataclass_fields__)


class LLM:
    """A model ready to generate on the default device.

    Example:
        ``LLM().generate(["def fib(n):"], SamplingParams(temperature=0, max_tokens=32))``
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        step_log: str | Path | None = None,
        log_plans: bool = False,
        **options: Any,
    ) -> None:
        """Load the weights and compile every cell of the grid.

        Args:
            model: folder of a checkpoint in Hugging Face format, "tiny-random", or None for the
                embedded model.
            step_log: write a line per step to this file (see ``glm-jax explain``).
            log_plans: write into it what every step was told too, so that ``glm-jax replay`` can
                run it again. Steps wait for all their outputs then.
            **options: fields of ``EngineConfig`` (dtype, weight_dtype, kv_cache_dtype,
                latent_norm_eps, page_size, num_pages, seed, layer_storage, layer_loop,
                max_model_len, max_num_seqs, max_num_batched_tokens, skip_tokenizer_init, ...).

        Raises:
            ValueError: an option is unknown or out of range, or the config is not of this family.
            FileNotFoundError: the model is not there.
            CheckpointError: its weights are incomplete, damaged or of another shape.
        """
        check_names("engine option", options, OPTIONS)
        found = find_model(model)
        device = jax.devices()[0]
        self.model_config, config = resolve_options(
            found.config, options, device.platform, fp8_checkpoint=found.fp8
        )
        budget = engine_budget(device, config.gpu_memory_utilization)
        if config.num_pages is None:
            config = fit_pool(self.model_config, config, device, budget)
        self.config = config
        if log_plans and step_log is None:
            raise ValueError("log_plans needs a step_log to write into. Give it a path.")
        self._observers = self._begin_log(step_log, device)
        self.tokenizer: Tokenizer | None = None
        if not self.config.skip_tokenizer_init and found.folder is not None:
            self.tokenizer = Tokenizer.from_path(found.folder)
        self.runner = self._compile(self._load(found, device), budget)
        self._measured = Measurements(self.compiler.store)
        self.engine = Engine(
            self.config,
            self._recorded() if log_plans else self.runner,
            step_time=self._measured.step_time,
            vocab_size=self.model_config.vocab_size,
            eos_token_ids=self.model_config.eos_token_ids,
            tokenizer=self.tokenizer,
        )
        self.engine.watches += [observer.add for observer in self._observers]
        self._numbers = itertools.count()
        self._pieces: dict[str, deque[StreamDelta]] = {}

    def _begin_log(self, path: str | Path | None, device: jax.Device) -> list[Observer]:
        """Return who observes from the start: the step log, if one is wanted."""
        if path is None:
            return []
        return [StepLog(path, header_now(self.config, self.model_config, device.platform))]

    def _compile(self, transformer: Transformer, budget: int) -> Runner:
        """Compile what the first request waits for, and begin with the rest."""
        lowering, programs = Lowering(self.model_config, self.config), ProgramTable()
        # The list and not the LLM, which would otherwise hold itself.
        tell = partial(_tell_compiled, self._observers)
        self.compiler = compile_service(lowering, programs, on_done=tell)
        order = warm_order(self.model_config, self.config)
        with compiling_bar(len(order.now)) as progress_compile:
            self.compiler.warm(order.now, progress_compile)
        # Before the pool is allocated: an error is better than a killed process.
        check_pool(lowering, programs.reports, budget)
        runner = Runner(transformer, lowering, programs)
        self.compiler.start(order.later)
        return runner

    def _recorded(self) -> Executor:
        """Return the runner with a recorder around it, whose calls the step log writes."""
        recorder = Recorder(self.runner)
        for observer in self._observers:
            if isinstance(observer, StepLog):
                observer.recorder = recorder
        return recorder.executor

    def _load(self, found: ModelFiles, device: jax.Device) -> Transformer:
        """Load the weights onto a device."""
        with loading_bar(found.name) as progress:
            return load_model(
                found._replace(config=self.model_config),
                dtype=self.config.dtype,
                weight_dtype=self.config.weight_dtype,
                storage=self.config.layer_storage,
                seed=self.config.seed,
                device=device,
                progress=progress,
            )

    def watch(self, observer: Observer) -> None:
        """Tell an observer (``Metrics``, a ``StepLog``) of every step and program from now on."""
        self._observers.append(observer)
        self.engine.watches.append(observer.add)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        timeout: float | int | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Generate for one or many prompts together, in their order.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            sampling_params: one for all, or one per prompt.
            priority: lower is served first, with scheduling_policy "priority"; one for all, or one
                per prompt.
            timeout: seconds after which a request is ended as it is.
            cache_salt: the prompts share cached pages only with requests of the same salt.

        Raises:
            ValueError: a prompt or parameter is refused; nothing of the call is generated.
        """
        options = {"timeout": timeout, "cache_salt": cache_salt}
        request_ids = self._add(prompts, sampling_params, priority, **options)
        return [output for output, _ in self._finish(request_ids)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[tuple[int, StreamDelta]]:
        """Generate as ``generate`` does, yielding (index of the prompt, new piece) at once.

        With ``n`` above 1 a piece's ``index`` says which completion it belongs to.
        """
        request_ids = self._add(prompts, sampling_params)
        index = {request_id: number for number, request_id in enumerate(request_ids)}
        pieces: deque[StreamDelta] = deque()
        self._pieces |= dict.fromkeys(request_ids, pieces)
        running = sum(map(self.engine.completions, request_ids))
        try:
            while running:
                while pieces:
                    delta = pieces.popleft()
                    running -= delta.finish_reason is not None
                    yield index[delta.request_id], delta
                if running:
                    self._step()
        finally:
            self._drop(request_ids)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        **template_variables: Any,
    ) -> RequestOutput:
        """Generate the next turn of a conversation with the checkpoint's chat template."""
        if self.tokenizer is None:
            raise ValueError(
                "chat needs a tokenizer, but there is none (skip_tokenizer_init). Pass token ids "
                "to generate."
            )
        prompt = self.tokenizer.encode_chat(messages, **template_variables)
        return self.generate([prompt], sampling_params)[0]

    def logits(self, token_ids: Sequence[int]) -> Float[np.ndarray, "T V"]:
        """Float32 logits at every position of a sequence, computed by the step programs."""
        request_id = self._next_id()
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        self.engine.add_request(request_id, list(token_ids), params, keep_logits=True)
        ((output, logits),) = self._finish([request_id])
        if output.outputs[0].error is not None or logits is None:
            raise RuntimeError(f"computing logits failed: {output.outputs[0].error}")
        return logits

    def _add(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] = 0,
        **options: Any,
    ) -> list[str]:
        """Queue all prompts or none."""
        listed = _as_prompts(prompts)
        count = len(listed)
        params = _one_each("sampling parameters", sampling_params or SamplingParams(), count)
        turns = _one_each("priorities", priority, count)
        request_ids: list[str] = []
        try:
            for prompt, param, turn in zip(listed, params, turns, strict=True):
                request_id = self._next_id()
                self.engine.add_request(request_id, prompt, param, priority=turn, **options)
                request_ids.append(request_id)
        except BaseException:
            self._drop(request_ids)
            raise
        return request_ids

    def _finish(
        self, request_ids: Sequence[str]
    ) -> list[tuple[RequestOutput, Float[np.ndarray, "T V"] | None]]:
        """Step until all of them have ended and hand out their results; on Ctrl-C drop them."""
        try:
            while not all(map(self.engine.is_finished, request_ids)):
                self._step()
            self._measured.save(self.engine.use)
            return [self.engine.release(request_id) for request_id in request_ids]
        except BaseException:
            self._drop(request_ids)
            raise

    def _step(self) -> None:
        """One step; every piece goes to the stream that waits for it, whoever steps."""
        for delta in self.engine.step().deltas:
            waiting = self._pieces.get(delta.request_id)
            if waiting is not None:
                waiting.append(delta)

    def _drop(self, request_ids: Iterable[str]) -> None:
        """End and forget requests, whatever state they are in."""
        self._measured.save(self.engine.use)
        for request_id in request_ids:
            self._pieces.pop(request_id, None)
            self.engine.abort(request_id)
            self.engine.forget(request_id)

    def _next_id(self) -> str:
        return f"llm-{next(self._numbers)}"


def _tell_compiled(observers: Iterable[Observer], report: CompileReport) -> None:
    for observer in tuple(observers):
        observer.compiled(program_name(report.key), report.source, report.seconds)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a flat list of integers is one prompt of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    listed: list[Any] = list(prompts)
    if listed and all(isinstance(token, int | np.integer) for token in listed):
        return [listed]
    return listed


def _one_each(what: str, given: Any, count: int) -> list[Any]:
    """One value for all prompts, or the values of each."""
    values = list(given) if isinstance(given, Sequence) else [given] * count
    if len(values) != count:
        raise ValueError(
            f"{len(values)} {what} for {count} prompts; give one for all or one per prompt."
        )
    return values
