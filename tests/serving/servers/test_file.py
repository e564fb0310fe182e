"""What a serve file may contain, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from upshot.core.errors import UserError
from upshot.serving.servers.file import ServerConfig, ServersConfig, read
from upshot.serving.servers.plan import compose, divide_memory, place_servers, visible_gpus


def written(folder: Path, text: str) -> Path:
    file = folder / "servers.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("servers: {a: {model: x, modle: y}}", "unknown key 'modle' in servers.a; did you mean 'model'?"),
        ("servers: {a: {model: x, engine: sglang}}", "servers.a.engine = 'sglang'"),
        ("servers: {a: {model: x, memory: 1.5}}", "servers.a.memory = 1.5"),
        ("servers: {a: {model: x, port: 70000}}", "servers.a.port"),
        ("servers: {a: {model: x, port: 81}, b: {model: y, port: 81}}", "port 81 is given to two servers"),
        ("servers: {a/b: x}", "'a/b' is not a valid server name"),
        ("servers: {a: x, a: y}", "the key 'a' appears twice"),
        ("servers: {}", "servers"),
        ("servers: {a: {model: x, arguments: [--port=1]}}", "'--port=1' is set by the key 'port'"),
        ("servers: {a: {model: x, devices: [0, 1]}}", "servers.a: devices [0, 1]: the upshot engine takes one GPU"),
        ("servers: {a: {model: x, devices: cpu, memory: 0.5}}", "memory is a share of a GPU"),
        ("servers: {a: {model: x, program: y}}", "has no effect with the upshot engine"),
        ("servers: {a: {model: x, replicas: 2}, a-1: y}", "servers.a-1: a replica has the same name"),
        ("servers: {a: {model: x, replicas: 2, port: 81}, b: {model: y, port: 82}}", "port 82 is given to two servers"),
        ("servers: {a: {model: x, replicas: 2, port: 65535}}", "port 65535 leaves no room for 2 consecutive ports"),
        ("servers: {a: {model: x, replicas: 2, devices: [0, 1, 2]}}", "cannot be divided among 2 replicas"),
        ("- a", "a mapping with `servers` is needed"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_key_and_way_out(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        read(written(tmp_path, text))
    assert told in str(caught.value)


def test_an_address_beyond_loopback_requires_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, "host: 0.0.0.0\napi_key_env: SERVERS_KEY\nservers: {a: x}")
    monkeypatch.delenv("SERVERS_KEY", raising=False)
    with pytest.raises(UserError, match=r"0\.0\.0\.0 is not loopback: set the environment variable SERVERS_KEY"):
        read(file)
    monkeypatch.setenv("SERVERS_KEY", "secret")
    assert read(file).key == "secret"


def test_a_model_folder_is_found_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    config = read(written(tmp_path, "servers: {a: tiny, b: org/name}"))
    assert [server.model for server in config.servers.values()] == [str(tmp_path / "tiny"), "org/name"]


def servers(**given: dict[str, object]) -> dict[str, ServerConfig]:
    return {name: ServerConfig.model_validate({"model": "m", "engine": "vllm", **s}) for name, s in given.items()}


def planned(gpus: list[str], **given: dict[str, object]) -> dict[str, float]:
    named = servers(**given)
    return divide_memory(named, place_servers(named, gpus))


def test_shares_that_sum_to_more_than_one_are_refused_with_the_sum() -> None:
    with pytest.raises(UserError, match=r"GPU 1: a 0.5 \+ b 0.4 \+ c 0.2 = 1.1 of its memory, more than 1"):
        planned(
            ["0", "1"],
            a={"devices": [0, 1], "memory": 0.5},
            b={"devices": [1], "memory": 0.4},
            c={"devices": [1], "memory": 0.2},
        )


def test_shares_that_sum_to_one_are_accepted() -> None:
    given = {name: {"memory": share} for name, share in {"a": 0.1, "b": 0.2, "c": 0.7}.items()}
    assert sum(planned(["0"], **given).values()) == pytest.approx(1)


def test_servers_without_a_share_divide_the_remaining_memory() -> None:
    found = planned(["0", "1"], a={"memory": 0.5}, b={}, c={"devices": [0, 1]}, d={"devices": "cpu"})
    assert found == pytest.approx({"a": 0.5, "b": 0.2, "c": 0.2})
    with pytest.raises(UserError, match=r"GPU 0: a 0.95 = 0.95 of its memory; nothing of 0.9 is left for b"):
        planned(["0"], a={"memory": 0.95}, b={})


def test_a_gpu_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match=r"servers.a.devices: there is no GPU 2 here \(GPUs 0 to 1\)"):
        planned(["0", "1"], a={"devices": [2]})
    with pytest.raises(UserError, match=r"memory is a share of a GPU, but there is none here"):
        planned([], a={"memory": 0.5})
    assert planned([], a={}) == {}


def test_device_numbers_count_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-77")
    assert visible_gpus() == ["3", "GPU-77"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_the_command_line_of_vllm_is_built_from_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSHOT_API_KEY", "secret")
    settings = {"model": "org/big", "engine": "vllm", "arguments": ["--max-model-len", 8192], "environment": {"N": 1}}
    config = ServersConfig.model_validate({"servers": {"user": settings}})
    command = compose(config, "user", 8001, ["2", "3"], 0.45, {"UPSHOT_API_KEY": "secret", "HOME": "/h"})
    assert command.words == [
        *("vllm", "serve", "org/big", "--host", "127.0.0.1", "--port", "8001", "--served-model-name", "user"),
        *("--gpu-memory-utilization", "0.45", "--tensor-parallel-size", "2", "--max-model-len", "8192"),
    ]
    assert command.environment == {"HOME": "/h", "CUDA_VISIBLE_DEVICES": "2,3", "N": "1", "VLLM_API_KEY": "secret"}


def test_the_command_line_of_the_embedded_engine_is_built_from_the_file() -> None:
    config = ServersConfig.model_validate({"servers": {"user": "smollm2-135m"}})
    on_gpu = compose(config, "user", 8001, ["0"], 0.3, {})
    assert on_gpu.words[1:5] == ["-m", "upshot.cli", "serve", "smollm2-135m"]
    assert on_gpu.words[-4:] == ["--device", "cuda", "--memory", "0.3"]
    on_cpu = compose(config, "user", 8001, [], None, {})
    assert on_cpu.words[-2:] == ["--device", "cpu"] and on_cpu.environment["CUDA_VISIBLE_DEVICES"] == ""


def test_replicas_are_processes_under_one_model_name(tmp_path: Path) -> None:
    text = "servers: {a: {model: x, engine: vllm, replicas: 2, port: 8001, devices: [0, 1, 2, 3]}, b: y}"
    config = read(written(tmp_path, text))
    assert [(n, s.port, s.devices) for n, s in config.servers.items()] == [
        *(("a-1", 8001, [0, 1]), ("a-2", 8002, [2, 3])),
        ("b", "auto", "auto"),
    ]
    assert list(map(config.asked_as, config.servers)) == ["a", "a", "b"]
    assert compose(config, "a-2", 8002, ["2", "3"], 0.9, {}).words[7:9] == ["--served-model-name", "a"]


def test_replicas_on_one_gpu_share_it(tmp_path: Path) -> None:
    config = read(written(tmp_path, "servers: {a: {model: x, replicas: 3, devices: [0]}}"))
    assert divide_memory(config.servers, place_servers(config.servers, ["0"])) == pytest.approx(
        dict.fromkeys(config.servers, 0.3)
    )
