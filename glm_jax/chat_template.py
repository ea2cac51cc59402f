"""Renders a checkpoint's own chat template to text, in a sandbox; called by Tokenizer."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplateError(ValueError):
    """The checkpoint has no usable chat template, or the template refused the conversation."""


class ChatTemplate:
    """One compiled template, with the names and filters that Hugging Face templates expect."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        """Compile the template.

        Args:
            source: the Jinja text; it comes with a checkpoint, so it runs sandboxed.
            special_tokens: strings it may refer to, such as `eos_token`.

        Raises:
            ChatTemplateError: the text is not valid Jinja.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        # Not Jinja's own tojson, which escapes for HTML.
        environment.filters["tojson"] = _to_json
        names = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source, globals=names)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template is not valid Jinja: {error.message} (line {error.lineno})"
            ) from error
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def from_path(cls, folder: Path) -> "ChatTemplate | None":
        """Read `chat_template.jinja`, else tokenizer_config.json's; None when there is neither."""
        config = read_json(folder / "tokenizer_config.json")
        file = folder / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
        if isinstance(source, list):
            named = {entry["name"]: entry["template"] for entry in source}
            if "default" not in named:
                raise ChatTemplateError(
                    f"{folder} names chat templates {sorted(named)} but none is 'default'; "
                    "put the wanted one in chat_template.jinja"
                )
            source = named["default"]
        if source is None:
            return None
        tokens = {key: token_text(config[key]) for key in _SPECIAL_TOKENS if config.get(key)}
        return cls(source, tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the conversation as text, special tokens written out.

        Args:
            messages: turns, each with `role` and `content`.
            tools: JSON schemas of callable functions, if any.
            add_generation_prompt: end with the opening of the assistant's turn.
            **variables: whatever else the template knows, such as `reasoning_effort`.

        Raises:
            ChatTemplateError: the template refused the messages, or reached outside the sandbox.
        """
        names = {**self._special_tokens, **variables}
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **names,
            )
        except (jinja2.TemplateError, TypeError) as error:  # TypeError: a field of the wrong type
            raise ChatTemplateError(f"the chat template failed: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty when there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def token_text(token: str | Mapping[str, Any]) -> str:
    """Return a special token's text; tokenizer_config.json has either form."""
    return token if isinstance(token, str) else token["content"]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
