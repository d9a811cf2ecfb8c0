"""A language model at the browser: it reads the session as a chat and writes the next command."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from allyouneed.apps.browse.browser import Browser, Session
from allyouneed.errors import UserError
from allyouneed.infer.decoding.detokenizer import detokenize
from allyouneed.infer.decoding.options import Decoding

if TYPE_CHECKING:
    from allyouneed.infer.predictors.generator import Generator
    from allyouneed.infer.predictors.reward import RewardModel

COMMAND_TOKENS = 200  # longest command


def ask_many(
    browser: Browser,
    model: Generator,
    questions: Sequence[str],
    best_of: int | None,
    reward: RewardModel | None,
    max_steps: int,
    decoding: dict[str, Any],
) -> list[Session]:
    """See `Browser.ask_many`. All sessions advance together, one command per round."""
    if (best_of is None) != (reward is None):
        raise UserError("best_of and reward belong together: the number of sessions, and the model that chooses one")
    defaults = {"max_length": COMMAND_TOKENS, "method": "greedy" if best_of is None else "sample"}
    options = model.decoding_options(Decoding.merge(defaults, decoding))
    sessions = [browser.session(question) for question in questions for _ in range(best_of or 1)]
    for number in range(max_steps):
        waiting = [session for session in sessions if not session.finished]
        # a chat that no longer fits the model ends without an answer
        prompts = [(session, model.chat_template.prompt(session.messages)) for session in waiting]
        fitting = [(session, ids) for session, ids in prompts if model.limit is None or len(ids) < model.limit]
        if not fitting:
            break
        found = model.engine.complete([ids for _, ids in fitting], options, None, number * len(sessions))
        for (session, ids), answers in zip(fitting, found, strict=True):
            session.step(detokenize(model.tokenizer, answers[0].tokens, ids, options.stop))
    if best_of is None or reward is None:
        return sessions
    groups = [sessions[begin : begin + best_of] for begin in range(0, len(sessions), best_of)]
    return [choose(group, reward) for group in groups]


def choose(sessions: Sequence[Session], reward: RewardModel) -> Session:
    """The session whose answer, with its quotes, has the highest reward; one without an answer only if all are."""
    ended = [session for session in sessions if session.finished] or list(sessions[:1])
    for session, score in zip(
        ended,
        reward.score([session.question for session in ended], [session.with_quotes() for session in ended]),
        strict=True,
    ):
        session.reward = score
    return max(ended, key=lambda session: -math.inf if session.reward is None else session.reward)
