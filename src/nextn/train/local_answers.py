"""Have the local engine answer prompts: several dialogues at once, turn by turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from nextn import api
from nextn.errors import NextnError
from nextn.train.dialogue import Answer, Answered, Dialogue, RefusedError, seed_of


def answer_locally(
    model: api.Model,
    dialogues: Iterable[Dialogue],
    *,
    at_once: int,
    options: Mapping[str, Any],
    draft_tokens: int | None = None,
    seed: int | None = None,
) -> Iterator[Answered]:
    """Answers by the engine, `at_once` dialogues together, turn by turn.

    Args:
        options: fields of `SamplingParams`, over the checkpoint's own defaults.
        draft_tokens: K; 0 decodes without the head.
    Raises:
        NextnError: what decoding raises, or text for a model without tokenizer or chat template.
    """
    waiting = iter(dialogues)
    while group := list(islice(waiting, at_once)):
        while group:
            asked: list[tuple[Dialogue, list[int], str]] = []
            for dialogue in group:
                try:
                    asked.append((dialogue, *_prompt(model, dialogue)))
                except RefusedError as error:
                    yield dialogue, str(error)
            run = api.Run(
                model,
                [ids for _, ids, _ in asked],
                draft_tokens=draft_tokens,
                options_each=[{**options, "seed": seed_of(seed, dialogue)} for dialogue, _, _ in asked],
            )
            for _ in run:
                pass
            group = []
            for (dialogue, ids, opening), result in zip(asked, run.results, strict=True):
                text = None if result.text is None else opening + result.text
                reason = result.finish_reason or "length"
                if dialogue.take(Answer(text, reason, ids, result.tokens, tokens=len(result.tokens))):
                    group.append(dialogue)
                else:
                    yield dialogue, None


def _prompt(model: api.Model, dialogue: Dialogue) -> tuple[list[int], str]:
    """Ids to decode from, and the beginning of the answer's text that the chat template already wrote.

    Raises:
        RefusedError: the template refuses the conversation, or the ids are not this model's or too many.
        NextnError: text for a model without tokenizer or chat template.
    """
    ids, opening = _encoded(model, dialogue)
    config = model.target.config
    if len(ids) >= config.max_positions:
        raise RefusedError(f"the prompt's {len(ids)} tokens fill the model's context of {config.max_positions}")
    if min(ids, default=-1) < 0 or max(ids) >= config.vocab:
        raise RefusedError(f"ids outside the vocabulary of {config.vocab}, or none")
    return ids, opening


def _encoded(model: api.Model, dialogue: Dialogue) -> tuple[list[int], str]:
    prompt, tokenizer = dialogue.prompt, model.tokenizer
    if isinstance(prompt, list):
        return prompt, ""
    if tokenizer is None:
        raise NextnError(f"{model.folder} ships no tokenizer.", "Give prompts as `input_ids`.")
    if isinstance(prompt, str):
        return tokenizer.encode(prompt), ""
    try:
        text = tokenizer.render_chat(
            dialogue.messages,
            tools=dialogue.line.get("tools"),
            variables=dialogue.line.get("chat_template_kwargs"),
        )
    except NextnError as error:
        if tokenizer.has_chat_template:
            raise RefusedError(error.what.rstrip(".")) from None
        raise
    # A template that opens the thinking itself expects it in the answer once the answer is history.
    opening = "<think>\n" if text.rstrip().endswith("<think>") else ""
    return tokenizer.encode(text, special=False), opening
