# %% [markdown]
# # A task in a notebook
#
# Rows, an environment, a verifier and a metric are defined in cells and trained with `upshot.train`. The task is a
# small version of the kiosk in [your own task](../own-task.md): a clerk may look up a price instead of guessing it.

# %%
import random

import upshot
from upshot import Conversation, Message, Observation, Participant, Row, Score, Task

THINGS, PRICES = ("tea", "milk", "bread", "soap"), ("1", "2", "3", "4", "5")
WARM_STEPS, STEPS, SIZE = 150, 20, 400

# %% [markdown]
# ## The environment: what the policy sees after its turn
#
# One object serves all conversations at once. Whatever belongs to a single conversation is kept in `conversation`.


# %%
class Till(Participant):
    """Says the price when the clerk looks it up."""

    async def observe(self, conversation: Conversation) -> Observation:
        """A price, or the end of the episode."""
        if not conversation.messages[-1].content.startswith("look"):
            return Observation(done=True, reason="answered")
        return Observation((Message("user", conversation.row.reference),), metrics={"looks": 1.0})


# %% [markdown]
# ## The task: rows, who answers, what is right


# %%
class Kiosk(Task):
    """A customer asks for a price that only the till knows."""

    name = "kiosk"

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def _row(self, rng: random.Random, name: str) -> Row:
        thing = rng.choice(THINGS)
        asked = (Message("user", f"how much is {thing} ?"),)
        return Row(name, asked, reference=f"{thing} is {rng.choice(PRICES)}", source=self.name, meta={"thing": thing})

    def rows(self, split: str) -> list[Row]:
        """The rows of a split."""
        rng = random.Random(f"rows {split}")
        return [self._row(rng, f"{split}/{number}") for number in range(self.size)]

    def environment(self) -> Participant:
        """Who answers between the turns."""
        return Till()

    async def verify(self, conversation: Conversation) -> Score:
        """1 where the last words are the right price."""
        last = conversation.last("assistant")
        return Score(float(last is not None and last.content == conversation.row.reference))

    def dialogues(self, split: str) -> list[tuple[Message, ...]]:
        """What the warm start imitates: in seven of ten conversations, the clerk guesses."""
        rng, out = random.Random(f"dialogues {split}"), []
        for _ in range(self.size):
            row = self._row(rng, "")
            looks = (Message("assistant", f"look {row.meta['thing']}"), Message("user", row.reference))
            first = row.messages if rng.random() < 0.7 else (*row.messages, *looks)
            out.append((*first, Message("assistant", row.reference)))
        return out

    def vocabulary(self) -> list[str]:
        """The words of the tiny model; a real one needs none."""
        return sorted({*THINGS, *PRICES, "how", "much", "is", "?", "look"})


# %% [markdown]
# ## The recipe, as a mapping
#
# Where a recipe file has names, a mapping may hold the classes and functions themselves.

# %%
recipe = {
    "name": "kiosk",
    "model": {"tiny": {"hidden": 64, "layers": 2}},
    "task": Kiosk,
    "episode": {"max_turns": 2, "max_tokens": 8},
    "reward": {"metrics": ["verifier"]},
    "warm_start": {"steps": WARM_STEPS, "batch": 32, "lr": 0.003},
    "train": {"advantage": "dr-grpo", "steps": STEPS, "prompts_per_step": 16, "group_size": 8, "lr": 0.0005},
    "run_dir": "runs/kiosk",
}
run = upshot.train(recipe)
print(run.status["state"], run.path)

# %% [markdown]
# ## What was learned

# %%
steps = [line for line in run.metrics if "reward/mean" in line]
for line in (steps[0], steps[len(steps) // 2], steps[-1]):
    print(f"step {line['step']:3}  right {line['reward/mean']:.2f}  turns {line['rollout/turns']:.2f}")

# %% [markdown]
# A guess is right one time in five; looking it up costs a turn and gives the price. For a reply without a score, the
# reward shown here would be `None`:

# %%
for reply in run.replies[-3:]:
    print(reply["reward"], reply["reply"])

# %% [markdown]
# `upshot view runs/kiosk` shows the page of the run. `upshot new task kiosk` writes the same task as files, with tests,
# a simulated user and a metric; [your own task](../own-task.md) explains them.
