"""Every command in the originals' READMEs and docstrings is imported, and the result starts.

The originals are CollabLLM's scripts, its verl recipe, the classmate fork and open-instruct. The commands are listed
here as data. What a machine without a network lacks (models, judges, data) is supplied by overrides; the rest stays as
imported.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tiny import tiny_parts
from upshot.cli import main, make_parser

KWARGS = (
    """--user_generation_kwargs '{"model": "gpt-4o-mini"}' """
    """--assistant_generation_kwargs '{"model": "sft-math-hard", "temperature": 0.6, "max_tokens": 256}' """
    """--reward_generation_kwargs '{"model": "claude-3-5-sonnet-latest"}'"""
)
LAUNCH = "CUDA_VISIBLE_DEVICES=0,1 torchrun --master_port=56500 --nnodes=1 --nproc_per_node=2 -m"
LOGGED = "--eval_steps 1 --logging_steps 1 --wandb_entity dsp-team --wandb_project collabllm --use_lora"
HARD = "--dataset_repo collabllm/collabllm-multiturn-math-hard"
EVAL = """--user_generation_kwargs '{"model": "gpt-4o"}' --eval_generation_kwargs '{"model": "gpt-4o-mini"}'"""
VERL_DATA = "data.train_files=$HOME/data/collabllm-math-hard-large"
CONFIGS = "reward_model.classmate_cot_reward_configs"
LIST = f"{CONFIGS}.classmate_model_name_or_path_list"
FORK = (
    "data.train_batch_size=16 data.max_prompt_length=1024 data.max_response_length=3072 data.truncation='error' "
    "data.filter_overlong_prompts=True actor_rollout_ref.model.path=Qwen/Qwen3-0.6B actor_rollout_ref.rollout.n=8 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.use_kl_loss=False trainer.total_epochs=3 "
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True actor_rollout_ref.rollout.name=vllm trainer.nnodes=1 "
    'trainer.logger=\'["console","wandb"]\' trainer.save_freq=40 trainer.test_freq=20 data.seed=0 '
    "\"reward_model.think_start_str='<think>'\" \"reward_model.think_end_str='</think>'\""
)


def fork(program: str, data: str, more: str = "", estimator: str = "grpo") -> str:
    files = f"data.train_files=\"['./data/{data}/train.parquet']\" data.val_files=\"['./data/{data}/dev.parquet']\""
    return f"python3 -m verl.trainer.{program} algorithm.adv_estimator={estimator} {files} {FORK} {more}"


CLASSMATE = (
    f"{CONFIGS}.classmate_reward_weight=1 {CONFIGS}.classmate_reward_type=vanilla_reward "
    f"{CONFIGS}.token_level_classmate_reward_mode=classmate_partial \"{CONFIGS}.main_cot_keep_rate='0.5'\" "
    f"{LIST}='[\"Qwen/Qwen3-0.6B\"]'"
)
MASON = "uv run python mason.py --cluster ai2/jupiter --priority normal --num_nodes {nodes} --gpus 8 -- "
ACCELERATE = (
    "accelerate launch --mixed_precision bf16 --num_processes 8 --use_deepspeed "
    "--deepspeed_config_file configs/ds_configs/stage3_no_offloading_accelerate.conf "
)
TULU = "--learning_rate 5e-06 --lr_scheduler_type linear --warmup_ratio 0.03 --gradient_checkpointing --seed 8"
SKYWORK = "reward_model.llm_judge_model_name=Skywork/Skywork-Reward-V2-Qwen3-0.6B"
TRAINS = {
    "collabllm sft": (
        f"{LAUNCH} scripts.train.sft {HARD} --output_dir outputs/sft --model_name meta-llama/Llama-3.1-8B-Instruct "
        "--per_device_train_batch_size 4 --per_device_eval_batch_size 4 --gradient_accumulation_steps 8 "
        f"--num_train_epochs 3 --learning_rate 1e-5 --lower_bound_metric 'rewards.accuracy' --lower_bound 0.5 {LOGGED}",
        {"train.method": "sft", "train.prompts_per_step": 64, "eval.data": "data/math-hard/sft_validation.parquet"},
    ),
    "collabllm offline dpo": (
        f"{LAUNCH} scripts.train.offline_dpo {HARD} --model_name outputs/sft --output_dir outputs/offline_dpo "
        f"--per_device_train_batch_size 4 --save_total_limit 10 --num_train_epochs 8 --learning_rate 5e-6 {LOGGED}",
        {"train.method": "dpo", "eval.data": "data/math-hard/dpo_validation.parquet", "train.save.keep": 10},
    ),
    "collabllm online dpo": (
        f"ENABLE_COLLABLLM_LOGGING=0 {LAUNCH} scripts.train.online_dpo --dataset_name math-hard {HARD} "
        f"--metric_names 'accuracy' 'interactivity' 'token_amount' --metric_weights 1 1 -0.5 {KWARGS} "
        "--model_name outputs/sft --output_dir outputs/online_dpo --per_device_train_batch_size 1 --num_samples 3 "
        f"--gpu_memory_utilization 0.6 --max_new_turns 4 --max_metric_workers 2 {LOGGED}",
        {"train.method": "online-dpo", "futures.rounds": 2, "episode.temperature": 0.6},
    ),
    "collabllm ppo": (
        f"{LAUNCH} scripts.train.ppo --dataset_name math-hard {HARD} --metric_names 'accuracy' 'token_amount' "
        f"--metric_weights 1 -0.5 {KWARGS} --model_name outputs/sft --base_model_name meta-llama/Llama-3.1-8B-Instruct "
        "--output_dir outputs/ppo --batch_size 1 --mini_batch_size 1 --num_ppo_epochs 1 --num_train_epochs 5 "
        "--learning_rate 2e-6 --num_samples 3 --max_new_turns 4 --use_lora",
        {"train.method": "ppo", "model.path": "outputs/sft", "futures.samples": 3},
    ),
    "verl recipe, rl": (
        f"python3 -m verl.trainer.main_ppo --config-name collabllm_trainer {VERL_DATA}/rl_train.parquet "
        "algorithm.adv_estimator=grpo data.train_batch_size=16 "
        "data.val_files=$HOME/data/collabllm-math-hard-large/rl_validation.parquet "
        "reward_model.reward_manager=collabllm +reward_model.reward_kwargs.metric_weights.accuracy=1 "
        "+reward_model.reward_kwargs.metric_weights.pass_rate=1 "
        "+reward_model.reward_kwargs.metric_weights.token_amount=-0.0001 "
        "+reward_model.reward_kwargs.llm_judge_kwargs.model=gpt-4o-mini data.filter_overlong_prompts=True "
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct actor_rollout_ref.actor.optim.lr=1e-6 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.use_kl_loss=True "
        "actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl "
        "actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.multi_turn.max_user_turns=2 "
        "actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts=3 trainer.total_epochs=20 trainer.nnodes=1 "
        "trainer.resume_from_path=null",
        {"reward.metrics.1.name": "code->pass_rate", "episode.long_prompts": "filter", "futures.rounds": 2},
    ),
    "verl recipe, sft": (
        f"torchrun --nnodes=1 --nproc_per_node=$1 -m verl.trainer.fsdp_sft_trainer {VERL_DATA}/sft_train.parquet "
        "data.val_files=$HOME/data/collabllm-math-hard-large/sft_validation.parquet data.multiturn.enable=true "
        "data.multiturn.messages_key=prompt optim.lr=1e-6 data.train_batch_size=64 data.max_length=8196 "
        "model.partial_pretrain=Qwen/Qwen2.5-7B-Instruct trainer.logger=console trainer.total_epochs=3 $@",
        {"train.method": "sft", "eval.data": "~/data/collabllm-math-hard-large/sft_validation.parquet"},
    ),
    "fork, gsm8k classmate": (
        fork("classmate_cot_main_ppo", "gsm8k", CLASSMATE, "grpo_w_classmate"),
        {"futures.name": "classmates", "futures.keep": 0.5, "train.optimizer.offload": True},
    ),
    "fork, gsm8k separated": (
        fork("qwen_classmate_cot_main_ppo", "gsm8k", CLASSMATE, "grpo_main_classmate_separated"),
        {"train.advantage": "separated"},
    ),
    "fork, gsm8k baseline": (
        fork("main_ppo", "gsm8k", "reward_model.token_level_main_reward_mode=output_only"),
        {"credit.tokens": "answer", "task.name": "gsm8k"},
    ),
    "fork, mmlu": (fork("qwen_main_ppo", "mmlu_sycophancy"), {"task.name": "mmlu-sycophancy", "task.count": "hint"}),
    "fork, sycophancy": (
        fork("main_ppo", "sycophancy", "reward_model.llm_judge_model_name=Qwen/Qwen3-32B"),
        {"task.behaviour": "sycophancy", "models.judge": "local:Qwen/Qwen3-32B"},
    ),
    "fork, general reward": (
        fork("main_ppo", "general_reward", f"{SKYWORK} reward_model.llm_judge_backend_type=hf_scoring"),
        {"reward.metrics.0.name": "rm_score"},
    ),
    "open-instruct sft": (
        f"{MASON.format(nodes=8)}{ACCELERATE} open_instruct/finetune.py --exp_name tulu3_8b_sft --max_seq_length 4096 "
        "--model_name_or_path meta-llama/Llama-3.1-8B --tokenizer_name meta-llama/Llama-3.1-8B --use_slow_tokenizer "
        "--chat_template tulu --dataset_mixer_list allenai/tulu-3-sft-mixture 1.0 --per_device_train_batch_size 1 "
        f"--gradient_accumulation_steps 2 --num_train_epochs 2 --report_to wandb --with_tracking {TULU}",
        {
            "train.method": "sft",
            "train.prompts_per_step": 128,
            "train.epochs": 2,
            "train.schedule.name": "linear",
            "train.data": "data/dolci/sft_train.parquet",
            "seed": 8,
            "name": "tulu3_8b_sft",
        },
    ),
    "open-instruct dpo": (
        f"{ACCELERATE} open_instruct/dpo_tune_cache.py --model_name_or_path allenai/Llama-3.1-Tulu-3-8B-SFT --beta 0.1 "
        "--mixer_list allenai/llama-3.1-tulu-3-8b-preference-mixture 1.0 --loss_type dpo --num_epochs 1 "
        f"--per_device_train_batch_size 1 --gradient_accumulation_steps 16 --use_lora --lora_rank 64 {TULU}",
        {
            "train.method": "dpo",
            "train.prompts_per_step": 128,
            "train.dpo.beta": 0.1,
            "model.lora.r": 64,
            "train.data": "data/dolci/dpo_train.parquet",
        },
    ),
    "open-instruct grpo": (
        'DATASETS="allenai/RLVR-GSM-MATH-IF-Mixed-Constraints 1.0"\n'
        f"{MASON.format(nodes=2)} source configs/setup.sh \\&\\& uv run open_instruct/grpo_fast.py "
        "--exp_name olmo_grpo --beta 0.01 --num_unique_prompts_rollout 48 --num_samples_per_prompt_rollout 16 "
        "--learning_rate 5e-7 --dataset_mixer_list $DATASETS --dataset_mixer_list_splits train --temperature 1.0 "
        "--max_prompt_token_length 2048 --response_length 2048 --pack_length 4096 --num_mini_batches 2 --num_epochs 1 "
        "--model_name_or_path allenai/Llama-3.1-Tulu-3-8B-DPO --apply_verifiable_reward True --non_stop_penalty True "
        "--non_stop_penalty_value 0.0 --total_episodes 2000000 --deepspeed_stage 2 --num_learners_per_node 6 "
        "--per_device_train_batch_size 1 --vllm_num_engines 10 --lr_scheduler_type constant --seed 1 --save_freq 40 "
        "--local_eval_every 25 --gradient_checkpointing --active_sampling --mask_truncated_completions False",
        {
            "train.prompts_per_step": 48,
            "train.group_size": 16,
            "train.steps": 2604,
            "train.kl.weight": 0.01,
            "train.minibatches": 2,
            "task.name": "dolci",
            "model.max_context": 4096,
            "episode.max_tokens": 2048,
            "train.clip.high": 0.272,
            "train.advantage": "dr-grpo",
            "train.importance.rule": "truncate",
            "reward.overlong.rule": "penalty",
            "reward.overlong.penalty": 0.0,
            "train.dynamic_sampling": 10,
        },
    ),
}
LINES = {
    "collabllm build": (
        f"python -m scripts.engine.build_dataset --dataset_name math-hard --metric_names 'accuracy' 'token_amount' "
        f"--metric_weights 1 -0.5 {KWARGS} --output_dir outputs/multiturn_data --train_size 100 --hf_entity collabllm",
        {"task": "math-hard", "conversations": 100, "policy": "openai/sft-math-hard"},
    ),
    "collabllm inference": (
        f"{LAUNCH} scripts.engine.inference --dataset_name medium --model_name meta-llama/Llama-3.1-8B-Instruct "
        f"--output_dir outputs/base --eval_metric_names 'document->bleu' 'interactivity' {EVAL} --eval_size 20",
        {"task": "medium", "goals": 20, "models": "model=local:meta-llama/Llama-3.1-8B-Instruct"},
    ),
    "verl process_dataset": (
        "python recipe/collabllm/process_dataset.py --dataset collabllm/collabllm-multiturn-math-hard "
        "--local_dir $HOME/data/collabllm-math-hard --dataset_type sft",
        {"dataset": "collabllm/collabllm-multiturn-math-hard", "purpose": "sft"},
    ),
    "verl preprocess": (
        "python preprocess_collabllm_datasets.py --dataset collabllm/collabllm-multiturn-medium --local_dir ~/data/x",
        {"purpose": "rl"},
    ),
    "verl merge": (
        "python -m verl.model_merger merge --backend fsdp --local_dir out/global_step_40/actor --target_dir out/merged",
        {"folder": "out/global_step_40/actor", "out": "out/merged"},
    ),
    "fork prepare": (
        "python3 verl/data_preprocessing/general_reward.py --seed 0 --local_save_dir ./data/general_reward",
        {"task": "general-quality", "out": "./data/general_reward", "seed": 0},
    ),
}
REFUSED = {
    "fork, classmates in the YAML": (
        fork("classmate_cot_main_ppo", "gsm8k", CLASSMATE.replace(LIST, "ignored.key")),
        "classmate_model_name_or_path_list stands in its YAML",
    ),
    "fork, unknown rows": (fork("main_ppo", "length_over_helpfulness"), "whose rows are these"),
    "fork, upload": ("python upload_ckpts_to_huggingface.py --root_path x --repo_name y", "which has no counterpart"),
    "open-instruct, reward model": (
        "accelerate launch open_instruct/reward_modeling.py --model_name_or_path allenai/Llama-3.1-Tulu-3-8B-SFT",
        "which has no counterpart",
    ),
}


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys; list items by position."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    found = {k: v for key, item in items for k, v in flat(item, f"{prefix}{key}.").items()}
    return {prefix[:-1]: value, **found} if prefix else found


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and a few rows of every kind of data."""
    folder = tmp_path_factory.mktemp("machine")
    module, tokenizer, _, _ = tiny_parts()
    module.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    said = [{"role": "user", "content": "the sum"}, {"role": "assistant", "content": "four"}]
    pair = {"chosen": [said[1]], "rejected": [{"role": "assistant", "content": "five"}]}
    rows: dict[str, list[dict[str, Any]]] = {
        "sft": [{"messages": said}] * 4,
        "dpo": [{"prompt": said[:1], **pair, "score_chosen": 1, "score_rejected": 0}] * 4,
    }
    for split, numbers in {"train": range(8), "validation": range(8, 16)}.items():
        rows[f"{split}_rows"] = [{"prompt": f"ask {n}", "answer": "3", "problem": f"sum {n}"} for n in numbers]
        rows[f"{split}_choice"] = [{"question": f"which {n}", "choices": ["a", "b"], "answer": 1} for n in numbers]
        rows[f"{split}_labelled"] = [{**row, "dataset": "gsm8k", "ground_truth": "3"} for row in rows[f"{split}_rows"]]
    for name, records in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def put_in(recipe: dict[str, Any], machine: Path) -> list[str]:
    """Overrides for what this machine lacks: local models and data, no tracker."""
    method, own = recipe["train"].get("method", "rl"), [f"model.path={machine / 'model'}", "trackers=[]"]
    own += [f"models.{name}=scripted:echo" for name in recipe.get("models", {}) if name != "peer"]
    own += [f"models.peer=local:{machine / 'model'}"] if "peer" in recipe.get("models", {}) else []
    if method in ("sft", "dpo"):
        own += ["model.max_context=128"] if "max_context" in recipe["model"] else []
        return [*own, f"train.data={machine / method}.jsonl", f"eval.data={machine / method}.jsonl"]
    kind = {"mmlu": "choice", "dolc": "labelled"}.get(recipe["task"]["name"][:4], "rows")
    if "file" in recipe["task"]:  # a file that is split here
        own += ["model.max_context=128", "episode.max_tokens=8"] if "max_context" in recipe["model"] else []
        return [*own, f"task.file={machine}/train_{kind}.jsonl"]
    own += [f"task.{split}_file={machine}/{split}_{kind}.jsonl" for split in ("train", "validation")]
    return [*own, "model.max_context=128", "episode.max_tokens=8"]


@pytest.mark.parametrize("name", TRAINS)
def test_a_training_becomes_a_recipe_that_starts(
    name: str, machine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, expected = TRAINS[name]
    (tmp_path / "theirs.sh").write_text(f"set -x\n{command}\n")
    out = tmp_path / "ours.yaml"
    # A template that is a name in their code has to be removed by hand.
    drop = ["--drop=--chat_template"] if "--chat_template" in command else []
    assert main(["recipe", "import", str(tmp_path / "theirs.sh"), "--out", str(out), *drop]) == 0
    recipe = yaml.safe_load(out.read_text())
    assert {key: flat(recipe).get(key) for key in expected} == expected
    assert "no counterpart is known" not in capsys.readouterr().err
    assert main(["train", str(out), "--dry-run", "--offline", *put_in(recipe, machine)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", LINES)
def test_a_command_that_does_not_train_becomes_the_matching_verb(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, expected = LINES[name]
    (tmp_path / "theirs.sh").write_text(f"{command}\n")
    assert main(["recipe", "import", str(tmp_path / "theirs.sh")]) == 0
    words = shlex.split(capsys.readouterr().out.replace("\\\n", ""), comments=True)
    assert words[0] == "upshot"
    args = vars(make_parser(words[1:]).parse_args(words[1:]))
    assert {key: args.get(key) for key in expected} == expected


@pytest.mark.parametrize("name", REFUSED)
def test_commands_without_a_counterpart_or_with_missing_parts_are_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, why = REFUSED[name]
    (tmp_path / "theirs.sh").write_text(f"{command}\n")
    assert main(["recipe", "import", str(tmp_path / "theirs.sh")]) == 2
    said = capsys.readouterr()
    assert why in said.err and said.out == ""
