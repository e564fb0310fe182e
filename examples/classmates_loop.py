"""Classmate training, complete and inline: a thought is valued by how much it helps another model.

The policy thinks before it answers, in plain steps or in a private code. A frozen classmate sees the question and the
thought, and answers. The tokens of the thought earn what the policy's answer and the classmate's answer are worth; the
tokens of the answer earn only what the policy's answer is worth. The configured twin is `classmates.yaml`.

    python examples/classmates_loop.py            # a few minutes on two CPU cores
"""

import asyncio
import random
import sys

from upshot import Conversation, Credit, Message, Rollout, Row, Score, Trainer
from upshot.rewards.credit import relabel, sampled_spans

LARGEST = 9
NUMBERS = tuple(map(str, range(2 * LARGEST + 1)))
PLAIN = (*NUMBERS, *["what", "is", "+", "?", "=", "thought", "####"])
CODE = {word: f"q{place}" for place, word in enumerate((*NUMBERS, "+", "="))}
WORDS = (*PLAIN, *CODE.values(), "<think>", "</think>")

WARM_STEPS, STEPS, PROMPTS, GROUP, SAMPLES = 150, 25, 16, 8, 2


def make_row(rng: random.Random, number: int) -> Row:
    """A question; answers are compared with the reference."""
    a, b = rng.randint(0, LARGEST), rng.randint(0, LARGEST)
    return Row(f"row-{number}", (Message("user", f"what is {a} + {b} ?"),), reference=a + b)


def steps_of(row: Row) -> str:
    """The plain thought."""
    a, b = row.messages[0].content.split()[2:5:2]
    return f"{a} + {b} = {row.reference}"


def demonstration(rng: random.Random, coded: float = 0.6) -> list[Message]:
    """What the policy's warm start imitates: mostly coded thoughts."""
    row = make_row(rng, 0)
    thought = steps_of(row)
    if rng.random() < coded:
        thought = " ".join(CODE[word] for word in thought.split())
    return [*row.messages, Message("assistant", f"<think> {thought} </think> #### {row.reference}")]


def classmate_demonstration(rng: random.Random) -> list[Message]:
    """What the classmate learned from: questions with plain thoughts. It knows nothing about a code."""
    row = make_row(rng, 0)
    return [classmate_prompt(row, steps_of(row)), Message("assistant", f"#### {row.reference}")]


def classmate_prompt(row: Row, thought: str) -> Message:
    """What the classmate is shown."""
    return Message("user", f"{row.messages[0].content} thought {thought}")


def is_correct(conversation: Conversation) -> float:
    """1 if the number after #### is the reference."""
    _, mark, number = conversation.messages[-1].content.rpartition("####")
    return float(bool(mark) and number.strip() == str(conversation.row.reference))


async def score_classmate(classmate: Trainer, reply: Rollout) -> Score:
    """How often the classmate is right when it sees the thought; missing if there is no thought."""
    row, thought = reply.conversation.row, reply.conversation.turns[-1].note.get("thought")
    if not thought:
        return Score.missing("no_thought")
    asked = Row(row.id, (classmate_prompt(row, thought),), reference=row.reference)
    talks = [Conversation(asked, reply.conversation.seed + number) for number in range(SAMPLES)]
    await asyncio.gather(*map(classmate.policy.reply, talks))
    return Score(sum(map(is_correct, talks)) / SAMPLES)


def credit(reply: Rollout, classmate: Score) -> Credit:
    """All sampled tokens earn the main part; those of the thought also earn the classmate's part."""
    talk = reply.conversation
    spans = sampled_spans(talk.mask)
    for at, sample in talk.places():
        if sample.thought is not None:
            spans = relabel(spans, at + sample.thought[0], at + sample.thought[1], ("classmate",))
    return Credit({"main": Score(is_correct(talk)), "classmate": classmate}, spans)


async def main(warm_steps: int = WARM_STEPS, steps: int = STEPS) -> list[float]:
    """Two warm starts, then the loop; returns how often the classmate was right in every step."""
    rng = random.Random(0)
    shape = {"hidden": 64, "layers": 2}
    trainer = Trainer.tiny(WORDS, shape=shape, max_tokens=12, lr=3e-3, advantage="dr-grpo")
    classmate = Trainer.tiny(PLAIN, seed=1, shape=shape, max_tokens=3, lr=3e-3)
    for _ in range(warm_steps):
        trainer.imitate([demonstration(rng) for _ in range(32)])
        classmate.imitate([classmate_demonstration(rng) for _ in range(32)])
        trainer.step()
        classmate.step()

    means = []
    trainer.config.lr = 1e-3
    for step in range(steps):
        rows = [make_row(rng, number) for number in range(PROMPTS)]
        groups = await trainer.sample(rows, GROUP, seed=step)  # 1 reply
        replies = [reply for group in groups for reply in group]
        scores = await asyncio.gather(*(score_classmate(classmate, reply) for reply in replies))  # 2 continue, 3 score
        for reply, score in zip(replies, scores, strict=True):  # 4 credit
            reply.credit = credit(reply, score)
        logs = trainer.forward_backward(groups) | trainer.step()  # 5 learn: advantages span by span, then update
        means.append(sum(score.value or 0.0 for score in scores) / len(scores))  # printed: without a thought, 0
        main_right = sum(is_correct(reply.conversation) for reply in replies) / len(replies)
        print(f"step {step + 1:3}  right {main_right:.2f}  classmate {means[-1]:.2f}  loss {logs['loss/policy']:+.4f}")
    await asyncio.gather(trainer.aclose(), classmate.aclose())
    return means


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
