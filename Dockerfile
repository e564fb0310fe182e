# Upshot: model servers, the sandbox, training. With vLLM: docker build --build-arg VLLM=vllm -t upshot .
FROM python:3.12-slim

# Triton compiles its kernels when they are first used.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/upshot
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY upshot upshot
COPY recipes recipes
RUN pip install --no-cache-dir -c constraints.txt '.[lora,kernels,schema]'

# An environment of its own: vLLM pins other versions. In a serve file: program: /opt/vllm/bin/vllm
ARG VLLM=
RUN if [ -n "$VLLM" ]; then python -m venv /opt/vllm && /opt/vllm/bin/pip install --no-cache-dir "$VLLM"; fi

# An ordinary user: the sandbox then makes a user namespace, and nothing here needs more.
RUN useradd --create-home upshot && mkdir /srv/servers && chown upshot /srv/servers
USER upshot
WORKDIR /home/upshot
ENTRYPOINT ["upshot"]
CMD ["--help"]
