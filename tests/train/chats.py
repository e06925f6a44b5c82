"""Chat templates of the kinds that published models use, written anew, and a tokenizer folder for each."""

from __future__ import annotations

from pathlib import Path

from nextn.engine.text import Tokenizer
from tests.engine.tokenizers_made import byte_level, write_folder

PLAIN = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""ChatML: nothing is rewritten."""

BLOCKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant\n"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}{{ '\\n' }}"
    "{% else %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""ChatML with the blocks that mark what the model writes."""

THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role != 'assistant' %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n"
    "{% else %}"
    "{% set thought = '' %}{% set said = m.content %}"
    "{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last %}<|start|>assistant\n<think>\n{{ thought }}\n</think>\n\n{{ said }}<|end|>\n"
    "{% else %}<|start|>assistant\n{{ said }}<|end|>\n{% endif %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""As Qwen3: an answer before the last question loses its thinking, the last one always shows a block."""

OPENED = THINKING.replace(
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}",
    "<think>\n",
)
"""As Qwen3.5: the generation prompt opens the thinking itself."""

DROPPED = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}<|start|>user\n{{ m.content }}"
    "{% else %}<|start|>assistant\n{{ m.content.split('</think>')[-1] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n<think>\n{% endif %}"
)
"""As DeepSeek-R1: thinking is opened by the prompt and left out of every rendered answer."""

LAST_USER = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]"
    "{% if loop.index0 >= messages|length - 2 and tools %}{{ tools | tojson }}{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}<|end|>{% endif %}{% endfor %}"
)
"""As Mistral: no generation prompt, and the tools stand before the last question."""


def chat_tokenizer(folder: Path, template: str | None) -> Tokenizer:
    """A byte-level tokenizer with a chat template, its end token ``<|end|>``."""
    return Tokenizer(write_folder(folder, byte_level(), {"eos_token": "<|end|>"}, template))
