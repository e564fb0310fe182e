"""A recipe names a model by a string or a mapping; a wrong key or value is answered with the right one."""

import subprocess
import sys

import pytest

from upshot.config.model_spec import ModelSpec
from upshot.config.sampling import Sampling
from upshot.core.errors import UserError


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("http://127.0.0.1:8000/v1", "endpoint"),
        ("https://host/v1#name", "endpoint"),
        ("openai/gpt-4o-mini", "provider"),
        ("scripted:echo", "scripted"),
        ("scripted:pkg.mod:function", "scripted"),
        ("smollm2-135m", "local"),
        ("local:Qwen/Qwen2.5-0.5B", "local"),
        ("./runs/mine/final", "local"),
        ("policy", "policy"),
    ],
)
def test_a_string_says_which_backend_is_meant(text, kind):
    assert ModelSpec.parse(text).kind == kind


def test_a_folder_with_a_config_is_a_local_model(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert ModelSpec.parse("mine").kind == "local"


@pytest.mark.parametrize(
    "given",
    [
        "http://h:1/v1#name",
        "http://h:1/v1/#name",
        {"url": "http://h:1/v1", "model": "name"},
        {"url": "http://h:1/v1#name"},
        {"model": "http://h:1/v1#name"},
    ],
)
def test_an_endpoint_can_be_written_in_several_ways(given):
    spec = ModelSpec.parse(given)
    assert (spec.url, spec.model) == ("http://h:1/v1", "name")


@pytest.mark.parametrize(
    ("url", "kind", "stored"),
    [
        (["http://h:1/v1", "http://h:2/v1/"], "replicas", ("http://h:1/v1", "http://h:2/v1")),
        (["http://h:1/v1", "http://h:1/v1/"], "endpoint", "http://h:1/v1"),
        ("runs/replicas.txt", "replicas", "runs/replicas.txt"),
    ],
)
def test_a_list_or_a_file_of_addresses_names_replicas(url, kind, stored):
    spec = ModelSpec.parse({"url": url, "model": "name"})
    assert (spec.kind, spec.url, spec.model) == (kind, stored, "name")
    assert ModelSpec.parse(spec.model_dump(mode="json")) == spec


def test_the_spec_of_one_replica_leaves_cache_and_retries_to_the_replica_set():
    whole = ModelSpec.parse({"url": ["http://h:1/v1", "http://h:2/v1"], "cache": True, "timeout_s": 3})
    one = whole.at("http://h:2/v1")
    assert (one.url, one.cache, one.retries, one.timeout_s) == ("http://h:2/v1", False, 0, 3)


def test_replicas_count_as_local_only_if_all_of_them_are():
    assert ModelSpec.parse({"url": ["http://127.0.0.1:1/v1", "http://localhost:2/v1"]}).on_this_machine
    assert not ModelSpec.parse({"url": ["http://127.0.0.1:1/v1", "http://h:2/v1"]}).on_this_machine


def test_with_only_a_url_the_endpoint_supplies_the_model_name():
    spec = ModelSpec.parse("http://h:1/v1")
    assert (spec.url, spec.model) == ("http://h:1/v1", "")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "policy", "temprature": 1}, "unknown option 'temprature' of a model; did you mean 'temperature'?"),
        ("gpt-4o-mini", "unknown model 'gpt-4o-mini'"),
        ({"model": "policy", "cache": True}, "the option 'cache' has no effect on 'policy'"),
        ({"model": "openai/x", "latency_s": 1}, "it applies to scripted models"),
        (
            {"model": "policy", "concurrency": 0},
            "models.user.concurrency = 0: input should be greater",
        ),
        (3, "models.user"),
        ({"url": ["http://h:1/v1", "h:2"]}, "'url' lists 'h:2', which is not an address"),
        ({"url": []}, "'url' is an empty list"),
        ({"url": ["http://h:1/v1", "http://h:2/v1"], "hedge": 0.1}, "unknown option 'hedge'"),
    ],
)
def test_mistakes_in_a_model_spec_are_named(given, message):
    with pytest.raises(UserError) as caught:
        ModelSpec.parse(given, "models.user")
    assert message in str(caught.value)
    assert "models.user" in str(caught.value)


def test_settings_of_the_spec_win_over_what_a_role_asks_for():
    asked = Sampling(max_tokens=10, temperature=1.0, seed=3)
    assert ModelSpec.parse({"model": "policy", "temperature": 0}).sampling(asked) == Sampling(10, 0, seed=3)
    assert ModelSpec.parse("policy").sampling(asked) is asked


def test_specs_and_connections_import_nothing_heavy():
    code = (
        "import sys, upshot.models.connect, upshot.models.structured, upshot.models.scripted, upshot.models.endpoint;"
        "print([m for m in ('torch', 'transformers', 'litellm', 'openai', 'aiohttp', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
