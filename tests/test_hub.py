"""`--model ORG/NAME`: from a server of the test, in place of the Hub, and from the cache without it."""

import functools
import http.server
import json
import threading

import huggingface_hub
import pytest
from test_bad_input import refuse
from test_distributed import finish, flags_of, start, torchrun
from test_train import record
from test_transformers import hf_folder

pytestmark = pytest.mark.shared
COMMIT = "0123456789" * 4
OTHERS = ("consolidated.safetensors", "pytorch_model.bin", "original/params.json")


class Hub(http.server.BaseHTTPRequestHandler):
    """What huggingface_hub asks for: the files of a revision, then each of them. `requests` are the paths of GETs."""

    folder, requests, url = None, [], None

    def do_GET(self, with_body=True):
        if with_body:
            self.requests.append(self.path)
        name = self.path.rsplit("/", 1)[-1]
        headers, body = {"X-Repo-Commit": COMMIT}, b""
        if "/org/gated" in self.path:
            headers |= {"X-Error-Code": "GatedRepo", "X-Error-Message": "ask the authors for access"}
        elif self.path.startswith("/api/models/org/tiny/"):
            names = [*(path.name for path in self.folder.iterdir()), *OTHERS]
            content = {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            if "/tree/" in self.path:  # which newer versions ask for
                content = [{"type": "file", "path": name, "size": 1, "oid": name} for name in names]
            body = json.dumps(content).encode()
        elif self.path.startswith("/org/tiny/resolve/"):
            body, headers = (self.folder / name).read_bytes(), headers | {"ETag": f'"{name}"'}
        else:
            headers |= {"X-Error-Code": "RepoNotFound"}
        self.send_response(200 if body else 403 if "/org/gated" in self.path else 404)
        for key, value in {**headers, "Content-Length": len(body)}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def do_HEAD(self):
        self.do_GET(with_body=False)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    Hub.folder, Hub.requests = hf_folder(tmp_path / "in"), []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Hub.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", Hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    yield Hub
    server.shutdown()


@pytest.mark.slow
def test_what_is_needed_is_downloaded_once_and_the_cache_does_without_the_hub(ppo, hub, tmp_path, monkeypatch):
    flags = dict(model="org/tiny@v1", max_prompt_tokens=64, max_new_tokens=8, num_iterations=1)
    command = torchrun(2, ppo.__file__, *flags_of(**flags, critic_model=tmp_path / "in"))
    code, output = finish(start(command, tmp_path), timeout=240)
    assert code == 0, output
    assert "/api/models/org/tiny/revision/v1" in hub.requests
    got = [path for path in hub.requests if "/resolve/" in path]
    assert {path.split("/")[-1] for path in got} >= {"config.json", "tokenizer.json", "model.safetensors"}
    assert not [path for path in got if path.endswith(OTHERS)]
    assert max(map(got.count, got)) == 1  # by two ranks, neither of which may be the first of its node
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # so that any request raises
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", tmp_path / "cache" / "hub")
    assert record(ppo, tmp_path, **flags, run_name="offline").summary["status"] == "completed"


@pytest.mark.parametrize(("name", "part"), [
    ("org/tyni", "RepositoryNotFoundError"), ("org/gated", "ask the authors for access"),
])  # fmt: skip
def test_a_name_that_is_nowhere_is_one_line(ppo, hub, tmp_path, monkeypatch, name, part):
    download = functools.partial(ppo.snapshot_download, endpoint=hub.url, cache_dir=tmp_path)
    monkeypatch.setattr(ppo, "snapshot_download", download)
    refuse(ppo, tmp_path, f"cannot find a folder {name}, or this repository on the Hub: ", part, model=name)
