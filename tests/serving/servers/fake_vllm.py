"""Stands in for the program `vllm`: its command line, /health, /v1/models, a child process as vLLM has, and a chat that
waits while there is a file `hold`."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import time
from pathlib import Path

words = sys.argv[1:]
options = dict(zip(words[2::2], words[3::2], strict=False))
name, port, host = options["--served-model-name"], int(options["--port"]), options["--host"]
key = os.environ.get("VLLM_API_KEY")
told = Path(os.environ["FAKE_FOLDER"]) / name
starts = int(told.read_text()) + 1 if told.exists() else 1
told.write_text(str(starts))
if starts <= int(os.environ.get("FAKE_FAILS", 0)) or Path(f"{told}.fails").exists():
    sys.exit("CUDA is on holiday")
child = subprocess.Popen(["sleep", "1000"])
Path(f"{told}.child").write_text(str(child.pid))


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        allowed = not key or self.path == "/health" or self.headers.get("Authorization") == f"Bearer {key}"
        hung = (told.parent / f"{name}.hung").exists()
        self.answer(503 if hung else 200 if allowed else 401, {"data": [{"id": name, "owned_by": "vllm"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        (told.parent / f"asked.{port}").touch()
        while (told.parent / "hold").exists():
            time.sleep(0.01)
        said = json.dumps({"current_answer": "", "thought": "", "response": "a red lamp please"})
        message = {"role": "assistant", "content": said}
        usage = {"prompt_tokens": 1, "completion_tokens": 4, "total_tokens": 5}
        self.answer(200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage})

    def answer(self, status: int, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


http.server.ThreadingHTTPServer((host, port), Handler).serve_forever()
