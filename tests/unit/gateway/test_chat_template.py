"""Chat templates of model folders."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from octavo.gateway.chat_template import ChatTemplate, TemplateOptions, load_chat_template
from octavo.gateway.http_errors import FieldError

USER = [{"role": "user", "content": "hé"}]


def render(source: str, messages: list[dict[str, Any]] = USER) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages)


def write_config(folder: Path, **config: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def test_template_sees_messages_special_tokens_and_the_generation_prompt() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{{ add_generation_prompt }}"
    )
    assert render(source) == "<s>[user:hé]True"


def test_blocks_leave_no_white_space() -> None:
    assert render("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}\n") == "x\n"


def test_json_is_written_with_its_own_letters() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "hé"}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"


def test_dates_loops_and_generation_marks_work() -> None:
    assert render("{{ strftime_now('%Y') }}") == datetime.now().strftime("%Y")
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("{% generation %}a{{ 1 + 1 }}{% endgeneration %}b") == "a2b"


def test_template_may_refuse_messages() -> None:
    with pytest.raises(FieldError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert (caught.value.param, caught.value.status) == ("messages", 400)


def test_template_cannot_reach_the_interpreter() -> None:
    with pytest.raises(FieldError):
        render("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(FieldError):
        render("{{ messages.append(1) }}")


def test_template_is_read_from_the_tokenizer_config(tmp_path: Path) -> None:
    write_config(
        tmp_path, chat_template="{{ bos_token }}{{ eos_token }}", bos_token={"content": "<b>"}, eos_token="<e>"
    )
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.render(USER) == "<b><e>"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    write_config(
        tmp_path,
        chat_template=[{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}],
        bos_token=None,
    )
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.render(USER) == "yes"


def test_file_of_its_own_comes_first(tmp_path: Path) -> None:
    write_config(tmp_path, chat_template="config", eos_token="<e>")
    (tmp_path / "chat_template.jinja").write_text("file{{ eos_token }}", encoding="utf-8")
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.render(USER) == "file<e>"


def test_model_without_a_template_has_none(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None


CHAT_SOURCE = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content | trim }}]{% endfor %}"
    "{% if add_generation_prompt %}[assistant:{% endif %}{{ mood }}"
)


def render_with(options: TemplateOptions, *contents: str) -> str:
    messages = [{"role": "user", "content": content} for content in contents]
    return ChatTemplate(CHAT_SOURCE, {}).render(messages, options)


def test_generation_prompt_can_be_left_out() -> None:
    assert render_with(TemplateOptions(adds_generation_prompt=False), "a") == "[user:a]"


@pytest.mark.parametrize("content", ["a b", " a b", "a b ", "b"])
def test_final_message_is_continued_from_the_end_of_its_content(content: str) -> None:
    options = TemplateOptions(adds_generation_prompt=False, continues_final_message=True)
    assert render_with(options, "b", content) == f"[user:b][user:{content.strip()}"


def test_message_without_content_cannot_be_continued() -> None:
    options = TemplateOptions(adds_generation_prompt=False, continues_final_message=True)
    with pytest.raises(FieldError, match="no content"):
        render_with(options, "b", " ")


def test_template_reads_variables_of_the_request() -> None:
    assert render_with(TemplateOptions(variables={"mood": "!"}), "a") == "[user:a][assistant:!"
    assert render_with(TemplateOptions(variables={"messages": []}), "a") == "[user:a][assistant:"
