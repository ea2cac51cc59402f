"""What the fake device's log-probabilities of a request must be, and a check that they are."""

from engine.fake_executor import Story, logprob_of, rank_of, top_ids_of
from engine.fake_program import hidden_of

from glm_jax import Logprob


def at(known, position, *, top=0, further=()) -> dict[int, Logprob]:
    """What is to be said of the token at a position, by the row before it."""
    hidden, token = hidden_of(position - 1, known[position - 1]), known[position]
    found = {token: Logprob(logprob_of(hidden, token), rank_of(hidden, token))}
    for place, id_ in enumerate(top_ids_of(hidden)[:top]):
        found[id_] = Logprob(logprob_of(hidden, id_), place + 1)
    for id_ in further:
        found.setdefault(id_, Logprob(logprob_of(hidden, id_)))
    return found


def without_text(position):
    return position and {id_: one._replace(decoded_token=None) for id_, one in position.items()}


def check(story: Story, name: str, prompt, **asked):
    """Release a finished request: results and stream pieces hold exactly what was asked for."""
    output = story.output(name)
    (completion,) = output.outputs
    known, first = [*prompt, *completion.token_ids], len(prompt)
    prompt_top, top = asked.get("prompt_logprobs"), asked.get("logprobs")
    labels = asked.get("logprob_token_ids", ())
    expected = expected_prompt = None
    if prompt_top is not None:
        expected_prompt = [None, *(at(known, n, top=prompt_top) for n in range(1, first))]
        if not completion.token_ids:
            expected_prompt = None
    if top is not None or labels:
        expected = [at(known, n, top=top or 0, further=labels) for n in range(first, len(known))]
    said = None if output.prompt_logprobs is None else [*map(without_text, output.prompt_logprobs)]
    assert said == expected_prompt
    found = completion.logprobs
    assert (found and [*map(without_text, found)]) == expected
    pieces = story.deltas[name]
    if expected is None:
        assert {delta.logprobs for delta in pieces} == {None}
        assert completion.cumulative_logprob is None
    else:
        assert [one for delta in pieces for one in delta.logprobs] == found
        assert all(len(delta.logprobs) == len(delta.token_ids) for delta in pieces)
        own = [one[token].logprob for one, token in zip(found, completion.token_ids, strict=True)]
        assert completion.cumulative_logprob == sum(own)
        assert [next(iter(one)) for one in found] == completion.token_ids
    # Once, with the first token.
    given = [n for n, delta in enumerate(pieces) if delta.prompt_logprobs is not None]
    drew = [n for n, delta in enumerate(pieces) if delta.token_ids]
    assert given == (drew[:1] if prompt_top is not None else [])
    assert all(pieces[n].prompt_logprobs == output.prompt_logprobs for n in given)
    return output
