"""`cluster_sim` compared with measured steps: calibrated on one run in local mode, it predicts others.

    python benchmarks/cluster_check.py                     # five short training runs on the CPU, a few minutes
    python benchmarks/cluster_check.py --verl              # the predicted ones on verl (`--local`, one rank)

Runs the quickstart with its user and a judge behind HTTP endpoints of a known latency (separate processes on loopback).
A run without latency gives the speed of engine and client together, in seconds per sequence of a decoding step. This is
the only fitted number. With it, rollouts with other latencies, in-flight limits and group sizes are predicted, then
measured. On verl, which looks for finished replies every two seconds, nothing is fitted: the speed is that of local
mode. On a busy machine the results are noisy, so the spread of the measured steps is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sim.site import Site
from benchmarks.sim.step import play
from benchmarks.sim.work import work_of
from upshot.config.load import load_recipe

ROOT = Path(__file__).resolve().parents[1]
USER = json.dumps({"current_answer": "none yet", "thought": "", "response": "please"})
JUDGE = json.dumps({"thought": "", "interactivity": 0.5})
ON_VERL = ("--engine", "verl", "--local")
POLL_S = 2.0
"""verl's own."""
TOKENS = 4
"""Of every policy turn: a new model does not know how to end one."""


@dataclass(frozen=True)
class Case:
    """One configuration: replies per prompt, seconds of a call of the user and of the judge, calls of each in
    flight."""

    group: int
    user_s: float
    judge_s: float
    in_flight: int

    def words(self, folder: str, user: str, judge: str, steps: int) -> list[str]:
        """The quickstart's overrides."""
        model = f"concurrency: {self.in_flight}, temperature: 0"
        return [
            f"models.user={{url: '{user}', model: test-model, {model}}}",
            f"models.judge={{url: '{judge}', model: test-model, {model}}}",
            "futures.user={name: llm, model: user, repairs: 0}",
            "reward.metrics=[verifier, interactivity]",
            f"train.group_size={self.group}",
            f"train.steps={steps}",
            "train.save.every=0",
            "train.prompts_per_step=4",
            "warm_start=null",
            "model.tiny={hidden: 32, layers: 1, heads: 2, mlp: 64}",  # little work: waiting is what is checked
            f"episode.max_tokens={TOKENS}",
            *([f"run_dir={folder}"] if folder else []),
        ]


CALIBRATION = Case(8, 0.0, 0.0, 64)
PREDICTED = (Case(8, 2.0, 4.0, 64), Case(8, 1.0, 2.0, 16), Case(4, 2.0, 1.0, 8), Case(16, 1.0, 3.0, 32))


def answer(body: dict[str, Any]) -> str:
    """The endpoints' answers: the judge is asked for interactivity, the user for a response."""
    return JUDGE if '"interactivity":' in str(body["messages"]) else USER


async def serve(latency: float) -> None:
    """An endpoint of a fixed latency, until it is killed."""
    from tests.models.misbehaving_server import MisbehavingServer

    async with MisbehavingServer(answer, latency=latency, keep_bodies=False) as server:
        print(server.url, flush=True)
        await asyncio.sleep(1e6)


def measured(case: Case, steps: int, engine: Sequence[str] = ()) -> list[float]:
    """Seconds of each step's rollout, without the first, which warms up."""
    words = [sys.executable, __file__, "--serve"]
    servers = [
        subprocess.Popen([*words, str(s)], stdout=subprocess.PIPE, text=True) for s in (case.user_s, case.judge_s)
    ]
    try:
        urls = [server.stdout.readline().strip() for server in servers if server.stdout]
        with tempfile.TemporaryDirectory() as folder:
            run = f"{folder}/run"
            command = [sys.executable, "-m", "upshot.cli", "train", "quickstart", "--quiet", *engine]
            subprocess.run([*command, *case.words(run, *urls, steps)], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    finally:
        for server in servers:
            server.terminate()
            server.wait()
    return [line["time/rollout"] for line in lines if "time/rollout" in line][1:]


def predicted(case: Case, per_sequence_s: float, poll_s: float = 0) -> float:
    """Seconds of a rollout by simulation."""
    work = work_of(load_recipe("quickstart", case.words("", "http://user/v1", "http://judge/v1", 1)).recipe)
    speed = {"fixed_s": 0, "per_sequence_s": per_sequence_s, "prompt_tokens_per_s": 1e9, "max_running": 10**6}
    site = Site.model_validate({
        "policy": {"reply_tokens": TOKENS, "server": speed},
        "helpers": {"user": {"latency_s": case.user_s}, "judge": {"latency_s": case.judge_s}},
        "workers": {"count": 1, "call_s": 0, "poll_s": poll_s},
    })  # fmt: skip
    return play(work, site, 1).rollout


def main() -> int:
    """Calibrate, predict, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--verl", action="store_true", help="measure what is predicted on verl, in verl's environment")
    parser.add_argument("--serve", type=float, metavar="SECONDS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        asyncio.run(serve(options.serve))
    first = measured(CALIBRATION, options.steps)
    per_sequence_s = statistics.median(first) / predicted(CALIBRATION, 1.0)  # without latency all times scale alike
    print(f"calibrated: {per_sequence_s * 1e3:.2f} ms for each sequence in a decoding step")
    print("replies a prompt | user s | judge s | in flight | measured s (least to most) | predicted s | off")
    for case in (*([] if options.verl else [CALIBRATION]), *PREDICTED):
        guess = predicted(case, per_sequence_s, POLL_S if options.verl else 0)
        run = first if case == CALIBRATION else measured(case, options.steps, ON_VERL if options.verl else ())
        middle = statistics.median(run)
        print(
            f"{case.group} | {case.user_s:g} | {case.judge_s:g} | {case.in_flight} | "
            f"{middle:.2f} ({min(run):.2f} to {max(run):.2f}) | {guess:.2f} | {guess / middle - 1:+.0%}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
