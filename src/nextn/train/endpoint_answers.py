"""Have a server answer prompts: several dialogues at a time, each in its thread, in any order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from itertools import islice

from nextn.train.dialogue import Answered, Dialogue, RefusedError, seed_of
from nextn.train.endpoint import Endpoint


def answer_remotely(
    endpoint: Endpoint, dialogues: Iterable[Dialogue], *, at_once: int, seed: int | None = None
) -> Iterator[Answered]:
    """Answers by a server, `at_once` requests at a time at most.

    Raises:
        NextnError: the server does not answer, or refuses everything.
        BaseException: whatever else ends a worker.
    """
    todo: queue.SimpleQueue[Dialogue | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[Answered | BaseException] = queue.SimpleQueue()

    def work() -> None:
        while (dialogue := todo.get()) is not None:
            try:
                while dialogue.take(endpoint.ask(dialogue, seed_of(seed, dialogue))):
                    pass
                done.put((dialogue, None))
            except RefusedError as error:
                done.put((dialogue, str(error)))
            except BaseException as error:
                done.put(error)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(at_once)]
    for worker in workers:
        worker.start()
    running = 0
    waiting = iter(dialogues)
    try:
        while True:
            for dialogue in islice(waiting, at_once - running):
                todo.put(dialogue)
                running += 1
            if not running:
                return
            outcome = done.get()
            running -= 1
            if isinstance(outcome, BaseException):
                raise outcome
            yield outcome
    finally:
        for _ in workers:
            todo.put(None)
