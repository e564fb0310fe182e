"""The examples of docs/api.md, one a section; `python docs/draw_api.py` puts them there."""

# %% Run a recipe
import upshot

SMALL = {
    "model.tiny": {"hidden": 16, "layers": 1, "heads": 2, "mlp": 32},
    "task.rows_per_split": 16,
    "warm_start": {"steps": 1, "batch": 4},
}
recipe = upshot.load("quickstart", train={"steps": 1, "prompts_per_step": 2, "group_size": 2}, **SMALL)
assert recipe.train.steps == 1
run = upshot.train(recipe, run_dir="runs/first", eval={"every": 0})
print(run.steps[-1]["reward/mean"], run.best)

# %% Read runs
run = upshot.runs.read("runs/first")
print(run.status["state"], len(run.replies), run.futures[0]["verifier"])
for other in upshot.runs.find("runs"):
    print(other.path, other.recipe.train.advantage.name)


# %% Score replies
def polite(conversation: upshot.Conversation) -> float | None:
    last = conversation.last("assistant")
    return None if last is None else float("please" in last.content)


opening = [{"role": "user", "content": "I need a table for two."}]
kind, curt = upshot.reward(opening, ["For what time, please?", "No."], rounds=0, metrics={polite: 1.0})
print(kind.reward.total.value, curt.reward.total.value)  # 1.0 0.0
# With rounds=2, policy= and user= name the models that continue the conversation, judge= the one that scores it.

# %% The loop in pieces
import asyncio  # noqa: E402


async def one_step() -> dict[str, float]:
    words = ["a", "table", "for", "two", "please", "?", "no", "at", "seven"]
    trainer = upshot.Trainer.tiny(words, max_tokens=4, lr=1e-3, shape={"hidden": 16, "layers": 1, "heads": 2})
    rows = [upshot.Row(str(n), (upshot.Message("user", "a table for two"),)) for n in range(2)]
    groups = await trainer.sample(rows, group_size=4)
    await trainer.score(groups, upshot.talk({polite: 1.0}))
    return trainer.forward_backward(groups) | trainer.step()


print(sorted(asyncio.run(one_step()))[:3])

# %% What was said, and what it is worth
row = upshot.Row("r1", (upshot.Message("user", "2 + 2 ?"),), reference="4")
conversation = upshot.Conversation(row)
conversation.say(upshot.Message("assistant", "4"))
print(conversation.last("assistant").content, upshot.Score(1.0), upshot.Score.missing("timeout", "judge").reason)


# %% Metrics
class Brief(upshot.Metric):
    """1 for a last message of at most `most` words."""

    def __init__(self, most: int = 20) -> None:
        self.most = most

    async def score(self, conversation: upshot.Conversation) -> upshot.Score:
        last = conversation.last("assistant")
        if last is None:
            return upshot.Score.missing("not_scored", "the assistant said nothing")
        return upshot.Score(float(len(last.content.split()) <= self.most))


metrics = {polite: 1.0, Brief: {"weight": 0.5, "most": 3}}  # a weight, or settings
print(upshot.reward(opening, "At seven, please?", rounds=0, metrics=metrics).reward.terms)


# %% Tasks
class Doubles(upshot.Task):
    """Questions made on the spot, checked by comparing text."""

    name = "doubles"

    def rows(self, split: str) -> list[upshot.Row]:
        ask = "{} + {} ?"
        return [
            upshot.Row(f"{split}/{n}", (upshot.Message("user", ask.format(n, n)),), reference=str(2 * n))
            for n in range(8)
        ]

    async def verify(self, conversation: upshot.Conversation) -> upshot.Score:
        last = conversation.last("assistant")
        return upshot.Score(float(last is not None and last.content == conversation.row.reference))

    def vocabulary(self) -> list[str]:
        return [*map(str, range(20)), "+", "?"]


run = upshot.train(recipe, task=Doubles, futures={"rounds": 0}, warm_start=None, run_dir="runs/doubles")
print(run.steps[-1]["reward/mean"])


# %% Verifiers
class Near(upshot.Verifier):
    """Right within a tolerance."""

    def __init__(self, tolerance: float = 0.5) -> None:
        self.tolerance = tolerance

    def score(self, response: str, reference: object, extra: object) -> upshot.Score:
        try:
            return upshot.Score(float(abs(float(response) - float(str(reference))) <= self.tolerance))
        except ValueError:
            return upshot.Score(0.0)


print(Near().score("4.2", "4", {}), Near().score("four", "4", {}))


# %% Participants and users
class Impatient(upshot.User):
    """Answers one question, then leaves."""

    async def observe(self, conversation: upshot.Conversation) -> upshot.Observation:
        if conversation.session.setdefault("answered", False):
            return upshot.Observation(done=True, reason="user")
        conversation.session["answered"] = True
        return upshot.Observation((upshot.Message("user", str(conversation.row.goal)),))


talk = upshot.Conversation(upshot.Row("r2", (), goal="a table at eight"))
print(asyncio.run(Impatient().observe(talk)).messages[0].content)

# %% Estimators
from upshot.rewards.advantages.grouped import within_groups  # noqa: E402


def best_only(step, margin: float = 0.0):
    """1 for the best replies of a group, 0 for the others; a missing reward stays out."""

    def compare(rewards):
        best = max((reward for reward in rewards if reward is not None), default=0.0)
        return [None if reward is None else float(reward >= best - margin) for reward in rewards]

    return within_groups(step, compare)


# %% Losses
from upshot.training.objectives.objectives import PolicyLoss  # noqa: E402


def plain(batch, logprobs_M, config):
    """The policy gradient without a clip."""
    ratio_M = (logprobs_M - batch.columns["old"]).exp()
    return PolicyLoss(-ratio_M * batch.columns["advantages"], ratio_M, 0 * ratio_M)


run = upshot.train(recipe, train={"advantage": best_only, "loss": plain}, run_dir="runs/own")
print(run.steps[-1]["loss/policy"])

# %% Credit rules
from upshot.rollout.credit.rules import CreditRule  # noqa: E402


class LastTurn(CreditRule):
    """The main reward to the last turn; the turns before it are not trained."""

    def credit(self, reply: upshot.Rollout, total: upshot.Score) -> upshot.Credit:
        last = list(reply.conversation.places())[-1:]  # where the sampled ids of a turn begin, and the turn's sample
        return upshot.Credit({"main": total}, tuple(upshot.Span(at, at + len(turn.ids)) for at, turn in last))


run = upshot.train(recipe, credit={"by": LastTurn}, run_dir="runs/last-turn")
print(run.rollouts[-1]["credit"])
