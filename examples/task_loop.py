"""A task in several turns, complete and inline: the environment says what is wrong; the finished episode is verified.

The task is sums of small numbers. The assistant should end with `#### number`. If it does not, the environment says so,
and the assistant may try again. An episode is worth 1 if the number is right, minus a fee for every turn in which the
environment had to step in. All tokens that the policy sampled get that reward. The configured twin is `task.yaml`.

    python examples/task_loop.py            # a minute or two on two CPU cores
"""

import asyncio
import random
import sys

from upshot import Conversation, Message, Observation, Participant, Row, Score, Trainer
from upshot.rewards.credit import credit_sampled

LARGEST = 9
REMINDER = "end with #### and the number"
WORDS = (*map(str, range(2 * LARGEST + 1)), *["what", "is", "+", "?", "=", "so", "it", "####"], *REMINDER.split())
FEE = 0.3

WARM_STEPS, STEPS, PROMPTS, GROUP, TURNS = 120, 25, 16, 8, 2


def make_row(rng: random.Random, number: int) -> Row:
    """A question; answers are compared with the reference."""
    a, b = rng.randint(0, LARGEST), rng.randint(0, LARGEST)
    return Row(f"row-{number}", (Message("user", f"what is {a} + {b} ?"),), reference=a + b)


def demonstration(rng: random.Random) -> list[Message]:
    """What the warm start imitates: right sums, most without the `####` line until the environment asks."""
    row = make_row(rng, 0)
    a, b = row.messages[0].content.split()[2:5:2]
    worked = f"{a} + {b} = {row.reference}"
    if rng.random() < 0.3:
        return [*row.messages, Message("assistant", f"{worked} #### {row.reference}")]
    unmarked = Message("assistant", f"{worked} so it is {row.reference}")
    return [*row.messages, unmarked, Message("user", REMINDER), Message("assistant", f"#### {row.reference}")]


class Reminder(Participant):
    """The environment: answers a reply without the `####` line, and ends the episode when a reply has it."""

    async def observe(self, conversation: Conversation) -> Observation:
        """What comes back after a turn of the policy."""
        if "####" in conversation.messages[-1].content:
            return Observation(done=True, reason="answered")
        return Observation((Message("user", REMINDER),), metrics={"reminders": 1.0})


def is_correct(conversation: Conversation) -> float:
    """1 if the number after #### is the reference."""
    _, mark, number = conversation.messages[-1].content.rpartition("####")
    return float(bool(mark) and number.strip() == str(conversation.row.reference))


def worth(conversation: Conversation) -> float:
    """What the finished episode is worth."""
    reminders = conversation.counts.get("reminders", 0.0)
    return is_correct(conversation) - FEE * reminders


async def main(warm_steps: int = WARM_STEPS, steps: int = STEPS) -> list[float]:
    """Warm start, then the loop; returns the mean reward of every step."""
    rng = random.Random(0)
    trainer = Trainer.tiny(WORDS, shape={"hidden": 64, "layers": 2}, max_tokens=12, lr=3e-3)
    for _ in range(warm_steps):
        trainer.imitate([demonstration(rng) for _ in range(32)])
        trainer.step()

    means = []
    trainer.config.lr = 1e-3
    for step in range(steps):
        rows = [make_row(rng, number) for number in range(PROMPTS)]
        # 1 reply and continue: up to two turns, the environment between them
        groups = await trainer.sample(rows, GROUP, seed=step, environment=Reminder(), max_turns=TURNS)
        replies = [reply for group in groups for reply in group]
        rewards = [worth(reply.conversation) for reply in replies]  # 2 score
        for reply, reward in zip(replies, rewards, strict=True):  # 3 credit: every sampled token of every turn
            rewards_of_group = rewards[reply.group * GROUP : (reply.group + 1) * GROUP]
            reply.credit = credit_sampled(Score(reward), reply.conversation.mask)
            reply.advantages = [reward - sum(rewards_of_group) / GROUP] * len(reply.credit.spans)  # one span per turn
        logs = trainer.forward_backward(groups) | trainer.step()  # 4 learn
        means.append(sum(rewards) / len(rewards))
        turns = sum(len(list(reply.conversation.samples())) for reply in replies) / len(replies)
        print(f"step {step + 1:3}  reward {means[-1]:.2f}  turns {turns:.2f}  loss {logs['loss/policy']:+.4f}")
    await trainer.aclose()
    return means


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
