"""A recipe names a model by one string or a mapping, and a wrong word is answered with the right one."""

import subprocess
import sys

import pytest

from upshot.errors import UserError
from upshot.models.base import Sampling
from upshot.models.spec import ModelSpec


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


def test_a_url_alone_leaves_the_name_to_the_endpoint():
    spec = ModelSpec.parse("http://h:1/v1")
    assert (spec.url, spec.model) == ("http://h:1/v1", "")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "policy", "temprature": 1}, "unknown option 'temprature' of a model; did you mean 'temperature'?"),
        ("gpt-4o-mini", "unknown model 'gpt-4o-mini'"),
        ({"model": "policy", "cache": True}, "the option 'cache' does nothing for 'policy'"),
        ({"model": "openai/x", "latency_s": 1}, "it is for scripted models"),
        ({"model": "policy", "concurrency": 0}, "models.user.concurrency: Input should be greater than or equal to 1"),
        (3, "models.user"),
    ],
)
def test_what_is_wrong_is_named(given, message):
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
