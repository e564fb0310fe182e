"""PPO and classmates train on verl, on one rank; the other runs use two."""

from __future__ import annotations

import math
from pathlib import Path

from tests.verl.real.verl_run import SMALL, VerlRun, locally, verl_run
from upshot.serving.servers.state import folder_of, is_up


def trains(run: VerlRun, steps: int, within: float = 1e-4) -> None:
    """Check that every step moved the weights by a finite gradient, and that sampler and trainer agree."""
    norms = run.series("train/grad_norm")
    assert len(norms) == steps and all(math.isfinite(norm) and norm > 0 for norm in norms)
    assert max(run.series("verl/training/rollout_probs_diff_max")) < within


def test_ppo_trains_policy_and_critic(tmp_path: Path) -> None:
    run = verl_run(
        tmp_path / "ppo", *SMALL, "train.steps=3", "train.method=ppo", "train.kl=0.01", "eval.every=0", ranks=1
    )
    trains(run, 3)
    assert len(run.series("value/mean")) == 3 and len(run.series("policy/kl_to_reference")) == 3
    assert all(math.isfinite(norm) and norm > 0 for norm in run.series("verl/critic/grad_norm"))


def test_classmates_of_a_folder_and_of_a_server_train_thoughts_and_each_is_loaded_once(tmp_path: Path) -> None:
    locally(tmp_path / "peer", "train.steps=30", "train.save.every=0", recipe="classmate-mini-peer")
    (peer,) = (tmp_path / "peer" / "checkpoints").glob("sft-*")
    own = ("train.prompts_per_step=4", "train.group_size=4", "eval.monitor=null")
    own += ("warm_start.steps=60", "warm_start.batch=32")
    more = ("train.steps=2", "train.save.every=0", "train.dynamic_sampling=1", f"models.peer={peer}")
    (tmp_path / "servers.yaml").write_text(f"servers: {{second: {{model: {peer}, devices: cpu}}}}")
    more += ("futures.classmates=[peer, second]", f"serve={tmp_path / 'servers.yaml'}", "models.second=serve:second")
    more += ("actor_rollout_ref.rollout.agent.num_workers=2",)
    run = verl_run(tmp_path / "run", *own, *more, recipe="classmate-mini", ranks=1)
    trains(run, 2)
    assert run.log.count(f"helper model {peer} is loaded") == 1, "two workers ask one process"
    assert (
        run.series("model/peer/classmate peer/calls")[-1] > 0
        and run.series("model/second/classmate second/calls")[-1] > 0
    )
    assert not is_up(folder_of(tmp_path / "servers.yaml")), "the servers end with the run"
    assert run.series("part/classmate") and run.series("part/main")
