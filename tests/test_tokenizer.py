import itertools
import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from glm_jax.chat_template import ChatTemplate, ChatTemplateError
from glm_jax.tokenizer import Tokenizer

SPECIALS = ["[gMASK]", "<sop>", "<|endoftext|>", "<|user|>", "<|assistant|>"]
TEXTS = [
    "def naïve(café):\n    return '€ 5' + \"日本語\"\n",
    "🙂🙃 emoji 👩‍👩‍👧 family, naïve again, 日本語 and €",
    "import os, sys\nfor line in sys.stdin: print(line)\n",
]
TEMPLATE = """\
[gMASK]<sop>
{%- if not messages %}{{ raise_exception('no messages') }}{% endif -%}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
<|{{ message.role }}|>
{{ message.content }}
{% endfor %}
{% if tools %}{{ tools | tojson }}{% endif %}
{% if add_generation_prompt %}<|assistant|>{{ '<think>' if think else '' }}{% endif %}
"""


def build_backend() -> tokenizers.Tokenizer:
    """A byte-level BPE of 300-odd entries, shaped like GLM's: prefix tokens, special tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_tokens([tokenizers.AddedToken("<tool call>", special=False)])
    backend.post_processor = processors.TemplateProcessing(
        single="[gMASK] <sop> $A",
        special_tokens=[(name, backend.token_to_id(name)) for name in ("[gMASK]", "<sop>")],
    )
    return backend


BACKEND = build_backend()


@pytest.fixture
def folder(tmp_path):
    BACKEND.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def write_json(path, **content):
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("text", [*TEXTS, "", "a<tool call>b"])
def test_encode_and_decode_are_inverse(text):
    tokenizer = Tokenizer(BACKEND)
    ids = tokenizer.encode(text)
    assert ids[:2] == [0, 1]
    assert tokenizer.encode(text, add_special_tokens=False) == ids[2:]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=False) == "[gMASK]<sop>" + text


@given(
    ids=st.lists(st.integers(0, BACKEND.get_vocab_size() + 5), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    skip=st.booleans(),
)
def test_streamed_text_equals_decoded_text(ids, cuts, skip):
    tokenizer = Tokenizer(BACKEND)
    decoder = tokenizer.incremental_decoder(skip_special_tokens=skip)
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    pieces = [decoder.push(ids[a:b]) for a, b in itertools.pairwise(edges)]
    assert "".join(pieces) + decoder.finish() == tokenizer.decode(ids, skip_special_tokens=skip)


def single_bytes(raw: bytes) -> list[int]:
    """One token per byte."""
    ids = [
        BACKEND.token_to_id(token) for token in map("".join, pre_tokenizers.ByteLevel.alphabet())
    ]
    tokenizer = Tokenizer(BACKEND)
    by_byte = {tokenizer.token_bytes(id_): id_ for id_ in ids}
    assert len(by_byte) == 256
    return [by_byte[bytes([byte])] for byte in raw]


def test_decoder_holds_back_unfinished_characters():
    decoder = Tokenizer(BACKEND).incremental_decoder()
    pieces = [decoder.push([id_]) for id_ in single_bytes("a€🙂".encode())]
    assert pieces == ["a", "", "", "€", "", "", "", "🙂"]
    assert decoder.finish() == ""


def test_decoder_gives_out_impossible_bytes_at_once():
    decoder = Tokenizer(BACKEND).incremental_decoder()
    pieces = [decoder.push([id_]) for id_ in single_bytes(b"\x80\x80\xe2\x82x\xf0\x9f")]
    assert pieces == ["\ufffd", "\ufffd", "", "", "\ufffdx", "", ""]
    assert decoder.finish() == "\ufffd"


def test_decoder_keeps_a_real_replacement_character():
    decoder = Tokenizer(BACKEND).incremental_decoder()
    assert decoder.push(single_bytes("\ufffd".encode())) == "\ufffd"


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ({"eos_token_id": [2, 3]}, {"eos_token_id": 4}, {}, (2, 3)),
        ({}, {"eos_token_id": 4}, {"eos_token": "<|endoftext|>"}, (4,)),
        ({}, {}, {"eos_token": "<|endoftext|>"}, (2,)),
        ({}, {}, {"eos_token": {"content": "<|user|>"}}, (3,)),
        ({}, {}, {}, ()),
    ],
)
def test_eos_ids_come_from_the_most_specific_file(folder, generation, config, tokenizer, expected):
    write_json(folder / "generation_config.json", **generation)
    write_json(folder / "config.json", **config)
    write_json(folder / "tokenizer_config.json", **tokenizer)
    assert Tokenizer.from_path(folder).eos_token_ids == expected


def test_chat_is_rendered_without_stray_whitespace(folder):
    tokenizer = Tokenizer.from_path(folder)
    messages = [
        {"role": "user", "content": "Grüße"},
        {"role": "skip", "content": "unseen"},
    ]
    assert tokenizer.render_chat(messages, think=True) == (
        "[gMASK]<sop><|user|>\nGrüße\n<|assistant|><think>"
    )
    assert tokenizer.render_chat(
        messages[:1], tools=[{"name": "größe <b>"}], add_generation_prompt=False
    ) == ('[gMASK]<sop><|user|>\nGrüße\n[{"name": "größe <b>"}]')
    ids = tokenizer.encode_chat(messages, think=True)
    assert ids[:3] == [0, 1, 3]
    assert ids.count(0) == 1


def test_chat_template_from_tokenizer_config(folder):
    (folder / "chat_template.jinja").unlink()
    write_json(
        folder / "tokenizer_config.json",
        eos_token={"content": "<|endoftext|>"},
        chat_template=[
            {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": "{{ messages[0].content }}{{ eos_token }}"},
        ],
    )
    rendered = Tokenizer.from_path(folder).render_chat([{"role": "user", "content": "x"}])
    assert rendered == "x<|endoftext|>"


def test_chat_template_knows_the_date():
    year = ChatTemplate("{{ strftime_now('%Y') }}").render([])
    assert len(year) == 4
    assert year.isdigit()


@pytest.mark.parametrize(
    ("source", "messages", "says"),
    [
        (TEMPLATE, [], "no messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", [], "unsafe"),
        ("{{ messages.append(1) }}", [], "unsafe|not safely callable"),
        ("{{ 'a' + messages[0].content }}", [{"content": None}], "NoneType"),
    ],
)
def test_chat_template_failures_are_named(source, messages, says):
    with pytest.raises(ChatTemplateError, match=says):
        ChatTemplate(source).render(messages)


def test_malformed_chat_template_is_refused():
    with pytest.raises(ChatTemplateError, match=r"not valid Jinja: .* \(line 2\)"):
        ChatTemplate("fine\n{% if %}")


def test_missing_chat_template_is_refused():
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        Tokenizer(BACKEND).render_chat([])


def test_named_templates_without_a_default_are_refused(folder):
    (folder / "chat_template.jinja").unlink()
    write_json(folder / "tokenizer_config.json", chat_template=[{"name": "a", "template": ""}])
    with pytest.raises(ChatTemplateError, match=r"\['a'\] but none is 'default'"):
        Tokenizer.from_path(folder)


def test_missing_tokenizer_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="skip_tokenizer_init"):
        Tokenizer.from_path(tmp_path)


def test_malformed_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        Tokenizer.from_path(tmp_path)


def test_other_kinds_of_tokenizer_are_refused():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.decoder = decoders.Metaspace()
    with pytest.raises(ValueError, match="byte-level BPE"):
        Tokenizer(backend)
