"""Have the local engine answer prompts, turn by turn: as one answer ends, the next prompt takes its place."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from nextn import api
from nextn.engine.admission import spare_positions, token_limit
from nextn.engine.engine import Engine
from nextn.engine.request import Request, Running
from nextn.engine.scheduler import Scheduler
from nextn.engine.stream import Detokenizer, TextStream
from nextn.errors import NextnError
from nextn.train.dialogue import Answer, Answered, Dialogue, RefusedError, seed_of

READ_AHEAD = 4
"""Dialogues read for each that is decoded: they are begun by length, since prompts of one length share a prefill."""
PLACES_REFILLED = 8
"""Of the places, one in so many must be free before new prompts are taken in, several at a time."""


@dataclass(frozen=True)
class _Asked:
    """A dialogue's next question.

    Attributes:
        opening: the beginning of the answer's text that the chat template already wrote.
        room: positions of the prompt and its longest answer, drafts launched ahead included.
    """

    dialogue: Dialogue
    request: Request
    opening: str
    room: int


def answer_locally(
    model: api.Model,
    dialogues: Iterable[Dialogue],
    *,
    at_once: int,
    options: Mapping[str, Any],
    draft_tokens: int | None = None,
    seed: int | None = None,
) -> Iterator[Answered]:
    """Answers by the engine, `at_once` dialogues at a time, in the order in which they end.

    Args:
        options: fields of `SamplingParams`, over the checkpoint's own defaults.
        draft_tokens: K; 0 decodes without the head.
    Raises:
        NextnError: what decoding raises, or text for a model without tokenizer or chat template.
    """
    if draft_tokens is None:
        draft_tokens = api.DRAFT_TOKENS if model.has_head else 0
    vocab = api.draft_vocabulary(model, None)
    engine = Engine(model.target, draft=model.draft, draft_tokens=draft_tokens, draft_vocab=vocab)
    spare = spare_positions(draft_tokens, ahead=1)
    unread = iter(dialogues)
    waiting: deque[_Asked] = deque()
    running: dict[int, _Asked] = {}
    scheduler: Scheduler | None = None
    room = 0
    while True:
        if len(waiting) < at_once:
            found: list[_Asked] = []
            for dialogue in islice(unread, READ_AHEAD * at_once):
                asked = _ask(model, dialogue, options, seed, spare)
                if isinstance(asked, _Asked):
                    found.append(asked)
                else:
                    yield dialogue, asked
            waiting.extend(sorted(found, key=lambda a: len(a.request.prompt)))
        if not waiting and not running:
            return
        if waiting and not running and (scheduler is None or waiting[0].room > room):
            # Later turns are longer: a pool that they outgrow is left once it is empty.
            rooms = sorted((a.room for a in waiting), reverse=True)[:at_once]
            room = rooms[0] = max(rooms[0], 2 * room)
            scheduler = engine.scheduler(rooms, prompts_first=True)
        assert scheduler is not None
        free = at_once - len(running)
        if free >= max(at_once // PLACES_REFILLED, 1):
            while free and waiting and waiting[0].room <= room:
                asked = waiting.popleft()
                running[scheduler.add(asked.request)] = asked
                free -= 1
        news = scheduler.step()
        for s, _ in news:
            if s.finish is None:
                continue
            asked = running.pop(s.index)
            if s.error is not None:
                yield asked.dialogue, s.error.what.rstrip(".")
            elif asked.dialogue.take(_answer(model, asked, s)):
                following = _ask(model, asked.dialogue, options, seed, spare)
                if isinstance(following, _Asked):
                    waiting.appendleft(following)
                else:
                    yield asked.dialogue, following
            else:
                yield asked.dialogue, None


def _ask(
    model: api.Model, dialogue: Dialogue, options: Mapping[str, Any], seed: int | None, spare: int
) -> _Asked | str:
    """A dialogue's next question, or why it is refused. Raises NextnError as `_encoded`."""
    try:
        ids, opening = _prompt(model, dialogue)
    except RefusedError as error:
        return str(error)
    params = api.sampling_params(model, **{**options, "seed": seed_of(seed, dialogue)})
    # Text is made once the answer is whole, unless a stop string may end it.
    stream = TextStream(model.tokenizer, prompt_ids=ids, stop=params.stop) if params.stop else None
    request = Request(ids, params, frozenset(model.defaults.eos_ids), stream)
    return _Asked(dialogue, request, opening, len(ids) + token_limit(request, model.target.config) + spare)


def _answer(model: api.Model, asked: _Asked, s: Running) -> Answer:
    request, text = asked.request, None
    if request.stream is not None:
        text = request.stream.text
    elif model.tokenizer is not None:
        ended = s.finish == "stop"
        pieces = Detokenizer(model.tokenizer.decode, request.prompt)
        text = pieces.push(*(s.tokens[:-1] if ended else s.tokens)) + pieces.flush()
    text = None if text is None else asked.opening + text
    return Answer(text, s.finish or "length", list(request.prompt), s.tokens, tokens=len(s.tokens))


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
