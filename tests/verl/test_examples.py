"""The files of examples/cluster are correct, as far as that can be checked without a cluster."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from upshot.cli import make_parser
from upshot.config.load import load_recipe
from upshot.verl.config import compose
from upshot.verl.plan import is_theirs

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster"
MANIFESTS = sorted(FOLDER.glob("*.yaml"))
PINS = dict(line.split("==") for line in (ROOT / "constraints-cluster.txt").read_text().splitlines() if "==" in line)


def documents(path: Path) -> list[dict[str, Any]]:
    """The objects of a manifest."""
    return list(yaml.safe_load_all(path.read_text()))


def cluster_of(document: dict[str, Any]) -> dict[str, Any]:
    """The Ray cluster of a RayJob or RayCluster."""
    return document["spec"].get("rayClusterSpec", document["spec"])


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod specs of an object."""
    if document["kind"] == "Deployment":
        return [document["spec"]["template"]["spec"]]
    if document["kind"] not in ("RayJob", "RayCluster"):
        return []
    cluster = cluster_of(document)
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_names_only_volumes_and_claims_that_it_defines(path: Path) -> None:
    claims = {d["metadata"]["name"] for d in documents(FOLDER / "storage.yaml")}
    for document in documents(path):
        assert {"apiVersion", "kind", "metadata", "spec"} <= set(document)
        for pod in pods(document):
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            used = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
            assert used == set(volumes)
            assert volumes["shared"]["persistentVolumeClaim"]["claimName"] in claims
            assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
            for container in pod["containers"]:
                assert container["resources"]["requests"] == container["resources"]["limits"]


@pytest.mark.parametrize("name", ["rayjob", "raycluster"])
def test_the_nodes_have_the_ray_that_was_run_and_as_many_gpus_as_the_run_asks_for(name: str) -> None:
    document = documents(FOLDER / f"{name}.yaml")[0]
    cluster = cluster_of(document)
    assert cluster["rayVersion"] == PINS["ray"]
    (group,) = cluster["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]  # a run cannot use nodes that join later
    if name == "rayjob":
        words = shlex.split(document["spec"]["entrypoint"])
        gpus = group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        assert f"trainer.nnodes={group['replicas']}" in words and f"trainer.n_gpus_per_node={gpus}" in words


def test_the_entrypoint_is_a_command_that_verl_can_run() -> None:
    words = shlex.split(documents(FOLDER / "rayjob.yaml")[0]["spec"]["entrypoint"])
    assert words[0] == "upshot"
    args, rest = make_parser(words[1:2]).parse_known_args(words[1:])
    overrides = [*args.overrides, *rest]
    theirs = [word for word in overrides if is_theirs(word)]
    recipe = load_recipe(args.recipe, [word for word in overrides if not is_theirs(word)]).recipe
    assert args.engine == "verl"
    compose(recipe, None, theirs).check()


def test_the_slurm_script_is_valid_bash_and_starts_what_it_waits_for() -> None:
    script = FOLDER / "train.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    nodes = re.search(r"--nodes=(\d+)", text)
    assert nodes and int(nodes[1]) > 1
    assert "--engine verl" in text and "$SLURM_JOB_NUM_NODES" in text


def test_the_image_copies_files_that_exist_and_takes_extras_that_exist() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    for line in text.splitlines():
        if line.startswith("COPY"):
            assert all((ROOT / name).exists() for name in line.split()[1:-1]), line
    extras = re.search(r"'\.\[([\w,]+)\]'", text)
    known = (ROOT / "pyproject.toml").read_text()
    assert extras and all(re.search(rf"^{extra} = \[", known, re.MULTILINE) for extra in extras[1].split(","))
