"""The stand-in as a program: `UPSHOT_VLLM=…/program.py` runs `test_real.py` itself without a vLLM."""

from __future__ import annotations

import itertools
import os
import sys
import time

from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.serving.vllm import fake_vllm

words = sys.argv[1:]
options = dict(itertools.pairwise(words[2:]))
fake_vllm.KEY = os.environ.get("VLLM_API_KEY", "")
server = fake_vllm.FakeVllm(
    AutoModelForCausalLM.from_pretrained(words[1]),
    port=int(options["--port"]),
    name=options["--served-model-name"],
    tokenizer=AutoTokenizer.from_pretrained(words[1]),
    gated="--middleware" in options,
)
while True:
    time.sleep(1000)
