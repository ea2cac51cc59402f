"""The decode loop on FakeDevice: its steps one by one, with what ends it read from the arrays."""

import numpy as np
from engine.fake_program import FakeDevice

from bucketing.grid import Cell
from bucketing.loop_inputs import LoopInputs, LoopOutputs
from bucketing.step_inputs import NO_STOP_ID, StepInputs, neutral_inputs


def run_loop(device: FakeDevice, cell: Cell, inputs: StepInputs, ends: LoopInputs) -> LoopOutputs:
    """Run steps until a group ends or may need a page, or the steps are used up."""
    assert cell.prefill == 0
    slots = [int(slot) for slot in inputs.group_slot[0]]
    used = [g for g, slot in enumerate(slots) if slot != device.limits.pad_slot]
    drafts, wished = inputs.group_drafts[0].tolist(), inputs.group_new_drafts[0].tolist()
    lines: list[tuple[np.ndarray, ...]] = []
    neutral = neutral_inputs(cell, device.limits, 1)
    # Past a request's last row there is no page, and a pass of the drafter writes nothing.
    device.last_rows = {slots[g]: int(ends.most_rows[0, g]) for g in used}
    now, going = inputs, True
    while going and len(lines) < ends.steps[0]:
        before = {g: device.computed[slots[g]] for g in used}
        if not lines:
            # Resets come with the first step: what is computed is known only now.
            for slot, computed in zip(inputs.reset_slot[0], inputs.reset_computed[0], strict=True):
                before |= {g: int(computed) for g in used if slots[g] == slot}
        new = [0] * cell.groups
        for g in used:
            new[g] = max(0, min(wished[g], int(ends.most_rows[0, g]) - before[g] - 2))
        now = now._replace(
            group_drafts=np.array([drafts], np.int32), group_new_drafts=np.array([new], np.int32)
        )
        outputs = device.run(cell, now)
        lines.append(
            (
                outputs.group_tokens[0],
                outputs.group_accepted[0],
                outputs.drafts[0],
                outputs.expert_load[0],
            )
        )
        for g in used:
            after = device.computed[slots[g]]
            drafts[g] = max(0, min(new[g], int(ends.most_rows[0, g]) - after - 1))
            going &= not _ended(device, ends, g, before[g], outputs)
            ahead = max(0, device.limits.num_drafts - 1) if device.writes_ahead else 0
            reach = min(after + 1 + drafts[g] + ahead, int(ends.most_rows[0, g]))
            going &= reach <= ends.page_rows[0, g]
        resets = {n: getattr(neutral, n) for n in neutral._fields if n.startswith("reset_")}
        pages = {n: getattr(neutral, n) for n in ("page_slot", "page_index", "page_value")}
        now = now._replace(**resets, **pages)
    device.last_rows = {}
    stacked = (np.stack(column)[None] for column in zip(*lines, strict=True))
    return LoopOutputs(np.array([len(lines)], np.int32), *stacked)


def _ended(device: FakeDevice, ends: LoopInputs, g: int, computed: int, outputs) -> bool:
    stops = {token for token in ends.end_ids[0, g].tolist() if token != NO_STOP_ID}
    for n in range(int(outputs.group_accepted[0, g]) + 1):
        length = computed + n + 2
        stop = outputs.group_tokens[0, g, n] in stops and length >= ends.min_length[0, g]
        if stop or length > ends.most_rows[0, g]:
            return True
    return False
