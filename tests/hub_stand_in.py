"""A small local server that stands for the Hugging Face Hub, as far as an upload needs it (large files by git-lfs)."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from collections.abc import Iterator

from tests.local_server import Request, Response, listening

TOKEN = "hf_stand_in"


class Hub:
    """What was made and uploaded. Whoever does not show `TOKEN` gets status 401; `refuse` is a status for everybody."""

    def __init__(self, refuse: int = 0):
        self.refuse = refuse
        self.repos: dict[str, dict] = {}
        self.files: dict[str, bytes] = {}
        self.large: dict[str, bytes] = {}  # by SHA-256
        self.lfs: set[str] = set()
        self.commits = 0
        self.url = ""

    def answer(self, method: str, path: str, body: bytes) -> dict:
        """The JSON answer to a request."""
        parts = path.split("?")[0].strip("/").split("/")
        if method == "PUT" and parts[0] == "storage":
            self.large[parts[1]] = body
            return {}
        if path.endswith("/info/lfs/objects/batch"):
            upload = {"href": f"{self.url}/storage/"}
            objects = json.loads(body)["objects"]
            for each in objects:
                each["actions"] = {"upload": {"href": upload["href"] + each["oid"], "header": {}}}
            return {"transfer": "basic", "objects": objects}
        if parts[:3] == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.repos[name] = asked
            return {"url": f"{self.url}/{name}"}
        if parts == ["api", "validate-yaml"]:
            return {"errors": [], "warnings": []}
        if parts[4:5] == ["preupload"]:
            asked = json.loads(body)["files"]
            mode = {True: "lfs", False: "regular"}
            return {
                "files": [
                    {
                        "path": each["path"],
                        "uploadMode": mode[each["path"].endswith(".safetensors")],
                        "shouldIgnore": False,
                    }
                    for each in asked
                ]
            }
        if parts[4:5] == ["commit"]:
            self.commit([json.loads(line) for line in body.splitlines()])
            return {"commitUrl": f"{self.url}/{parts[2]}/{parts[3]}/commit/abc", "commitOid": "abc"}
        raise KeyError(path)

    def commit(self, lines: list[dict]) -> None:
        """Take a commit's files."""
        self.commits += 1
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                content = self.large[value["oid"]]
                assert hashlib.sha256(content).hexdigest() == value["oid"]
                self.files[value["path"]] = content
                self.lfs.add(value["path"])


@contextlib.contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """It listens at `hub.url` inside the block."""

    def answer(request: Request) -> Response:
        allowed = request.path.startswith("/storage/") or request.headers.get("authorization") == f"Bearer {TOKEN}"
        headers = {"content-type": "application/json"}
        if hub.refuse or not allowed:
            return Response({"error": "Invalid user token."}, hub.refuse or 401, headers)
        try:
            return Response(hub.answer(request.method, request.path, request.body), headers=headers)
        except KeyError:
            return Response({}, 404, headers)

    with listening(answer) as hub.url:
        yield hub
