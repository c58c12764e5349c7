"""`--model ORG/NAME`: from a server of the test, in place of the Hub, and from the cache without it."""

import functools
import http.server
import json
import threading

import huggingface_hub
import pytest
from test_bad_input import refuse
from test_distributed import finish, flags_of, start, torchrun
from test_model import CHATML
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
            files = (path for path in self.folder.rglob("*") if path.is_file())
            names = [*(str(path.relative_to(self.folder)) for path in files), *OTHERS]
            content = {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            if "/tree/" in self.path:  # which newer versions ask for
                content = [{"type": "file", "path": name, "size": 1, "oid": name} for name in names]
            body = json.dumps(content).encode()
        elif self.path.startswith("/org/tiny/resolve/"):
            path = self.folder / self.path.split("/", 5)[-1]  # of /org/tiny/resolve/REVISION/
            body, headers = path.read_bytes(), headers | {"ETag": f'"{name}"'}
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


def test_a_revision_comes_with_all_that_a_model_needs(ppo, hub, tmp_path, monkeypatch):
    (hub.folder / "additional_chat_templates").mkdir()
    (hub.folder / "additional_chat_templates" / "tools.jinja").write_text("with tools")
    download = functools.partial(ppo.snapshot_download, endpoint=hub.url, cache_dir=tmp_path / "hub")
    monkeypatch.setattr(ppo, "snapshot_download", download)
    folder = ppo.locate_model("org/tiny@v1")
    assert "/api/models/org/tiny/revision/v1" in hub.requests
    assert not [path for path in hub.requests if path.endswith(OTHERS)]
    ppo.load_hf_checkpoint(folder)
    expected, tokenizer = ppo.HFTokenizer(hub.folder), ppo.HFTokenizer(folder)
    assert tokenizer.hf.chat_template == {"default": CHATML, "tools": "with tools"} == expected.hf.chat_template
    assert (tokenizer.stop_ids, tokenizer.hf.get_vocab()) == (expected.stop_ids, expected.hf.get_vocab())


def test_files_of_the_hub_that_are_downloaded(ppo):
    """The names that models of the Hub have. Weights in other formats are large."""
    needed = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
              "special_tokens_map.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja",
              "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]  # fmt: skip
    others = [*OTHERS, "README.md", "model.gguf", "flax_model.msgpack", "onnx/model.onnx", "optimizer.pt",
              "modeling.py", "consolidated.00.pth", "pytorch_model.bin.index.json", "tf_model.h5"]  # fmt: skip
    found = huggingface_hub.utils.filter_repo_objects([*others, *needed], allow_patterns=ppo.HUB_FILES)
    assert sorted(found) == sorted(needed)


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
