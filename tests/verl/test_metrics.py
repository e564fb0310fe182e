"""verl's metrics under our names."""

from __future__ import annotations

from upshot.verl.recorder import mark_own, rename_metrics


def test_metrics_with_the_same_meaning_get_our_name_and_others_keep_theirs() -> None:
    told = {**mark_own({"reward/mean": 0.5, "eval/reward/mean": 1.0}), "actor/grad_norm": 2.0, "perf/mfu/actor": 0.1}
    line = rename_metrics({**told, "bad": float("nan"), "word": "x", "number in words": "3"})
    assert (line["reward/mean"], line["train/grad_norm"], line["eval/reward/mean"]) == (0.5, 2.0, 1.0)
    assert line["verl/perf/mfu/actor"] == 0.1
    assert not {"verl/bad", "verl/word", "verl/number in words"} & set(line)


def test_an_update_that_verl_skipped_is_counted_as_in_local_mode() -> None:
    assert rename_metrics({"actor/grad_norm": 0.5})["train/skipped"] == 0.0
    assert rename_metrics({"actor/grad_norm": float("inf")}) == {"train/skipped": 1.0}


def test_metrics_that_only_resemble_local_modes_have_different_names() -> None:
    line = rename_metrics({"actor/entropy": 1.0, "actor/lr": 2.0, "actor/pg_loss": 3.0})
    assert not {"policy/entropy", "train/lr", "loss/policy"} & set(line)
    assert rename_metrics({"actor/loss": 4.0}) == {"loss/policy": 4.0}
    assert line == {"verl/actor/entropy": 1.0, "verl/actor/lr": 2.0, "verl/actor/pg_loss": 3.0}
