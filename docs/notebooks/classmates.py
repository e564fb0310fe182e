# %% [markdown]
# # Classmates from zero
#
# Classmates are other models that answer from the policy's thought; a thought is scored by how well it helps them.
# Here a tiny policy can think in plain steps or in a private code, and it answers well either way. A classmate
# understands only plain steps. If the classmate's answer counts in the reward, the policy learns to think in plain
# steps.

# %%
import upshot

PEER_STEPS, WARM_STEPS, STEPS, ROWS = 150, 200, 24, 100

# %% [markdown]
# ## The classmate
#
# A small model with its own vocabulary, trained on plain thoughts.

# %%
peer = upshot.train("classmate-mini-peer", train={"steps": PEER_STEPS}, run_dir="runs/peer")
print(f"loss {peer.metrics[0]['loss/nll']:.2f} → {peer.metrics[-1]['loss/nll']:.2f}")

# %% [markdown]
# ## The policy: three fifths of its demonstrations think in code

# %%
models = {"peer": str(peer.checkpoint)}
warm = upshot.train(
    "classmate-mini", models=models, warm_start={"steps": WARM_STEPS}, train={"steps": 0}, run_dir="runs/warm"
)
print(warm.status["state"], warm.checkpoint)

# %% [markdown]
# ## Two runs from the same start
#
# Two runs (*twins*) have the same start, the same rows and the same number of steps. One is rewarded only for its own
# answer (`futures=none`). The other is also rewarded for the classmate's answer; this part of the reward is credited
# to the tokens of the thought.

# %%
shared = {
    "models": models,
    "model": {"path": str(warm.checkpoint)},
    "warm_start": None,
    "train.steps": STEPS,
    "eval.every": STEPS,
    "eval.rows": ROWS,
}
alone = upshot.train("classmate-mini", run_dir="runs/alone", **shared, futures="none")
together = upshot.train("classmate-mini", run_dir="runs/together", **shared)

# %% [markdown]
# ## What changed
#
# The monitor is a script that reads only the question and the thought. It follows plain steps, and predicts a wrong
# answer if it cannot read the thought. Its F1 shows how well it predicts whether the answer is right.


# %%
def last(run: upshot.runs.RunFolder, key: str) -> float | None:
    """The last value of a metric in a run."""
    return next((line[key] for line in reversed(run.metrics) if key in line), None)


for name, run in {"alone": alone, "with a classmate": together}.items():
    found = {key: last(run, f"eval/{key}") for key in ("metric/verifier", "monitor/f1", "classmate/score")}
    print(f"{name:17}", {key: round(value, 2) for key, value in found.items() if value is not None})

# %% [markdown]
# A thought before and after, from the runs' replies:

# %%
for run in (alone, together):
    print(run.path.name, "|", run.rollouts[-1]["messages"][-1])

# %% [markdown]
# This is one seed with a few steps. The evaluation is at temperature 0, where each model always thinks in its most
# likely way, so the numbers are extreme. The measured table (three seeds at temperature 1), its caveats and all options
# are in [classmates](../classmates.md). With real models (not run here, because data and models come from a hub):
#
#     upshot data prepare --for rl --task gsm8k --dataset gsm8k/train.jsonl --out data/gsm8k
#     upshot train classmate-gsm8k model.path=MODEL models.peer=PEER                     # (GPU)
#     upshot train classmate-gsm8k model.path=MODEL futures=none                         # (GPU) its twin
