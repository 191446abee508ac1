"""A chat template turns messages into one prompt text: a Jinja program that comes with the model.

It is somebody else's program, so it runs in Jinja's immutable sandbox, and what it may use is
what the field agreed on: `messages`, `add_generation_prompt`, `bos_token`, `eos_token`,
`raise_exception`, `strftime_now`, `tojson`.

The insight for hostile text: a message that says `<|im_end|>` must stay a text, but after
rendering nobody can tell it from the template's own. So before rendering, control strings in
messages are broken by a noncharacter after each character (`break_control`). What the template
itself writes is whole; what a user wrote is not; the tokenizer drops the mark when it encodes
the rest as text. Limits: a template that compares or measures such a message sees the marks,
and a control string that only comes about by joining a message's end to the template's own
text is not recognised as the user's.
"""

import json
import re
from datetime import datetime

BREAK = "\ufdd0"  # a Unicode noncharacter, reserved for a program's own use: no text may contain it


def render(template: str, messages: list[dict], generate: bool, bos_token: str, eos_token: str) -> str:
    """The prompt text; `generate` opens the assistant's turn. Raises ValueError with the template's own words."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)  # Jinja's own would escape < and > for HTML

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = tojson
    env.globals.update(raise_exception=raise_exception, strftime_now=lambda form: datetime.now().strftime(form))
    names = dict(messages=messages, add_generation_prompt=generate, bos_token=bos_token, eos_token=eos_token)
    try:  # `tools` and `documents` are always defined elsewhere, so templates ask `is not none`
        return env.from_string(_plain_jinja(template)).render(**names, tools=None, documents=None)
    except (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise ValueError(f"the model's chat template refuses these messages: {error}") from error


def _plain_jinja(template: str) -> str:
    """`{% generation %}` marks an answer for training and prints nothing; Jinja does not know it."""
    template = re.sub(r"(\{%[-+]?\s*)generation(\s*[-+]?%\})", r"\1if true\2", template)
    return re.sub(r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})", r"\1endif\2", template)


def break_control(value: object, control: re.Pattern) -> object:
    """The same messages, but in every text every control string is broken after each character."""
    if isinstance(value, str):
        return control.sub(lambda match: "".join(c + BREAK for c in match[0]), value.replace(BREAK, ""))
    if isinstance(value, dict):
        return {key: break_control(item, control) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [break_control(item, control) for item in value]
    return value
