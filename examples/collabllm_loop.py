"""CollabLLM's loop, complete and inline: a reply is worth what it leads to.

A customer wants a colour and a thing and says only one of them. The assistant may guess, or ask. Every reply is forked
into two futures, in which a customer who knows the goal continues the conversation. The end is scored, and the tokens
of the reply get the score. There is no recipe and no run folder: everything that happens is on this page. The
configured twin is `collabllm.yaml`.

    python examples/collabllm_loop.py            # a few minutes on two CPU cores
"""

import asyncio
import random
import sys

from upshot import Conversation, Message, Row, Score, Trainer
from upshot.rewards.credit import credit_sampled

COLOURS = ("red", "blue", "green", "black", "white", "pink")
THINGS = ("lamp", "chair", "bowl", "coat", "hat", "rug")
WORDS = (*COLOURS, *THINGS, *["i", "want", "a", "something", "here", "is", "which", "colour", "thing", "?"])

WARM_STEPS, STEPS, PROMPTS, GROUP, SAMPLES, WINDOW = 80, 30, 16, 8, 2, 1


def ask(slot: str) -> Message:
    """The assistant's question."""
    return Message("assistant", f"which {slot} ?")


def give(colour: str, thing: str) -> Message:
    """The assistant's answer."""
    return Message("assistant", f"here is a {colour} {thing}")


def make_row(rng: random.Random, number: int, midway: float = 0.4) -> Row:
    """An opening that leaves out the colour or the thing. Some start half-way, after the question was answered.

    The goal is what the customer wants; the policy never sees it.
    """
    goal = {"colour": rng.choice(COLOURS), "thing": rng.choice(THINGS)}
    hidden = rng.choice(("colour", "thing"))
    opening = f"i want a {goal['colour']} something" if hidden == "thing" else f"i want a {goal['thing']}"
    talk = [Message("user", opening)]
    if rng.random() < midway:
        talk += [ask(hidden), Message("user", goal[hidden])]
    return Row(f"row-{number}", tuple(talk), goal, meta={"hidden": hidden})


def demonstration(rng: random.Random) -> list[Message]:
    """What the warm start imitates: mostly guesses, sometimes a question whose answer is then used."""
    row = make_row(rng, 0, midway=0.25)
    guess = dict(row.goal)
    if len(row.messages) == 1:
        guess[row.meta["hidden"]] = rng.choice(THINGS if row.meta["hidden"] == "thing" else COLOURS)
    return [*row.messages, give(**guess)]


def customer(conversation: Conversation) -> Message | None:
    """The simulated user: answers a question from the goal, and leaves once it is given something."""
    words = conversation.messages[-1].content.split()
    asked = [slot for slot in ("colour", "thing") if slot in words]
    return Message("user", conversation.row.goal[asked[0]]) if words[:1] == ["which"] and asked else None


def is_correct(conversation: Conversation) -> float:
    """1 if the last message gives the customer what they wanted."""
    return float(conversation.messages[-1] == give(**conversation.row.goal))


async def worth(trainer: Trainer, reply: Conversation) -> float:
    """What a reply leads to: fork it, let customer and policy continue, score the end; the mean over the forks."""

    async def future(number: int) -> float:
        fork = reply.fork("future", number)
        for _ in range(WINDOW):
            answer = customer(fork)
            if answer is None:
                break
            fork.say(answer)
            await trainer.policy.reply(fork)
        return is_correct(fork)

    return sum(await asyncio.gather(*map(future, range(SAMPLES)))) / SAMPLES


async def main(warm_steps: int = WARM_STEPS, steps: int = STEPS) -> list[float]:
    """Warm start, then the loop; returns the mean reward of every step."""
    rng = random.Random(0)
    trainer = Trainer.tiny(WORDS, shape={"hidden": 64, "layers": 2}, max_tokens=8, lr=3e-3)
    for _ in range(warm_steps):
        trainer.imitate([demonstration(rng) for _ in range(32)])
        trainer.step()

    means = []
    trainer.config.lr = 1e-3
    for step in range(steps):
        rows = [make_row(rng, number) for number in range(PROMPTS)]
        groups = await trainer.sample(rows, GROUP, seed=step)  # 1 reply
        replies = [reply for group in groups for reply in group]
        # 2 fork, 3 continue, 4 score
        rewards = await asyncio.gather(*(worth(trainer, reply.conversation) for reply in replies))
        for reply, reward in zip(replies, rewards, strict=True):  # 5 credit: all of the reply's own tokens
            rewards_of_group = rewards[reply.group * GROUP : (reply.group + 1) * GROUP]
            reply.credit = credit_sampled(Score(reward), reply.conversation.mask)
            reply.advantages = [reward - sum(rewards_of_group) / GROUP]  # one span: the reply
        logs = trainer.forward_backward(groups) | trainer.step()  # 6 learn
        means.append(sum(rewards) / len(rewards))
        asked = sum(reply.conversation.messages[-1].content.startswith("which") for reply in replies) / len(replies)
        print(f"step {step + 1:3}  reward {means[-1]:.2f}  asks {asked:.2f}  loss {logs['loss/policy']:+.4f}")
    await trainer.aclose()
    return means


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
