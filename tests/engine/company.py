"""Real requests together with scripted drafts: each must get the tokens it gets alone without."""

from collections.abc import Mapping
from random import Random

from glm_jax import SamplingParams
from glm_jax.engine.draft_policy import FixedDrafts
from glm_jax.engine.engine import Engine
from glm_jax.engine.outputs import RequestOutput, StepRecord
from glm_jax.engine.plan import PlanEntry, StepPlan
from glm_jax.engine.request import RowClass
from scripts.fuzz_drafts import ScriptedDrafts, scripts_for
from scripts.fuzz_schedules import Asked, tokens_alone

# The most drafts of the golden model's programs.
K = 5


def ask(rng: Random, length: int, **options) -> Asked:
    """A request of so many tokens; sampled, and not ended by any token."""
    settings = {"temperature": 0.9, "top_p": 0.95, "seed": length, "max_tokens": 14, **options}
    return Asked(rng.choices(range(120), k=length), SamplingParams(ignore_eos=True, **settings))


class Company:
    """Requests on one engine, and what each of them generates alone.

    Attributes:
        engine: The engine.
        plans: Of the steps, in order.
        records: Of the same steps.
        expected: The tokens alone by request id.
        outputs: The results by request id, once all have ended.
    """

    def __init__(
        self,
        llm,
        asked: Mapping[str, Asked],
        *,
        drafts=K,
        drafter="half",
        target=None,
        expected=None,
        **options,
    ) -> None:
        self.asked = asked
        self.expected = expected or {name: tokens_alone(llm, one) for name, one in asked.items()}
        self.plans: list[StepPlan] = []
        self.records: list[StepRecord] = []
        self.outputs: dict[str, RequestOutput] = {}
        target = target or llm
        target.runner.reset()
        self.engine = Engine(
            options.pop("config", target.config),
            target.runner,
            vocab_size=llm.model_config.vocab_size,
            fault_hook=self._hook,
            **options,
        )
        self.engine.scheduler.drafting.policy = FixedDrafts(drafts)
        script = drafter
        if isinstance(drafter, str):
            script = scripts_for(llm.model_config.vocab_size).get(drafter)
        if script is not None:
            ScriptedDrafts(self.engine, target.runner, self.expected, script)

    def _hook(self, phase: str, plan: StepPlan | None) -> None:
        if phase == "pack":
            self.plans.append(plan)

    def add(self, *names: str) -> None:
        for name in names:
            self.engine.add_request(name, *self.asked[name])

    def step(self) -> StepPlan:
        record = self.engine.step().record
        assert record.fault is None
        self.records.append(record)
        return self.plans[-1]

    def finish(self) -> None:
        """Run to the end; aborted requests have some of their tokens."""
        while self.engine.has_unfinished:
            self.step()
        for name, tokens in self.expected.items():
            output, _ = self.engine.release(name)
            self.outputs[name] = output
            completion = output.outputs[0]
            assert completion.finish_reason in ("length", "stop", "abort")
            if completion.finish_reason == "abort":
                tokens = tokens[: len(completion.token_ids)]
            assert completion.token_ids == tokens
            assert output.drafts.accepted_tokens == sum(self.accepted(name))
        scheduler = self.engine.scheduler
        assert scheduler.pages.free == scheduler.pages.capacity
        assert sorted(scheduler._residents.free_slots) == list(range(scheduler.config.max_num_seqs))

    def accepted(self, name: str) -> list[int]:
        """How many drafts each verifying step accepted for a request."""
        return [
            group.accepted
            for record in self.records
            for group in record.drafts
            if group.request_id == name
        ]


def entries(plan: StepPlan) -> dict[str, PlanEntry]:
    return {entry.request_id: entry for entry in plan.entries}


def classes(plan: StepPlan) -> list[RowClass]:
    return sorted(entry.row_class for entry in plan.entries)


DECODES = {"a": 4, "b": 19, "c": 11}


def decoding(llm, names="abc", *, newcomer: Asked | None = None, **options) -> Company:
    """Requests that have drafts to verify, and one that is not there yet."""
    asked = {name: ask(Random(name), DECODES[name], max_tokens=25) for name in names}
    if newcomer is not None:
        asked["new"] = newcomer
    company = Company(llm, asked, **options)
    company.add(*names)
    running = company.engine.scheduler.running
    while sum(request.decoding for request in running) < len(names):
        company.step()
    return company
