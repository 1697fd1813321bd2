"""A fake Hub on the loopback interface, with the endpoints that huggingface_hub's client needs and a log of requests.

Repositories are kept in memory, those of data sets under datasets/OWNER/NAME. As on the Hub, large files are served by
a redirect to another host, which must not receive the token. The server can cut connections and alter bytes on request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from hub.repositories import Repo, card_problems, entry, git_id, is_large

USERS = {"hf_owner": "owner", "hf_stranger": "stranger"}
"""Users by token."""
REPOSITORY = r"(?P<name>(?:datasets/)?[\w.-]+/[\w.-]+)"
API = rf"/api/(?:models/|(?=datasets/)){REPOSITORY}"


class FakeHub(ThreadingHTTPServer):
    """The server. Its attributes control failures and record requests."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.log: list[tuple[str, str, int]] = []
        """Method, path and size of the response body of every request."""
        self.uploads: list[str] = []
        self.leaked: list[str] = []
        """Paths on the other host to which a token was sent."""
        self.cut_after: list[int] = []
        """Numbers of bytes after which the connections of the next downloads are cut."""
        self.cut_upload = False
        self.altered = False
        self.broken = 0
        """If not 0, the status of the response to every request."""
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def handle_error(self, request, client_address):
        """Prints nothing: connections are cut on purpose."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def put(self, name: str, files: dict[str, bytes], branch: str = "main", **about) -> str:
        """Adds a commit, as another user would."""
        repo = self.repos.setdefault(name, Repo(**about))
        # Branches with the Hub's own conversions do not contain the original files.
        parent = None if branch.startswith("refs/convert/") else repo.branches["main"]
        before = repo.commits.get(repo.branches.get(branch, parent), {})
        content = {**before, **files}
        commit = hashlib.sha1(repr((len(repo.commits), sorted(content))).encode()).hexdigest()
        repo.commits[commit], repo.branches[branch] = content, commit
        for path, data in files.items():
            if is_large(path, len(data)):
                self.objects[hashlib.sha256(data).hexdigest()] = data
        return commit

    def files(self, name: str, branch: str = "main") -> dict[str, bytes]:
        repo = self.repos[name]
        return repo.commits[repo.branches[branch]]

    def fetched(self) -> list[str]:
        """The paths of the large files that were downloaded, once per download."""
        commits = [files for repo in self.repos.values() for files in repo.commits.values()]
        paths = {hashlib.sha256(data).hexdigest(): path for files in commits for path, data in files.items()}
        requested = [path.removeprefix("/large/") for method, path, _ in self.log if method == "GET"]
        return [paths[oid] for oid in requested if oid in paths]

    def served(self, method: str = "GET", containing: str = "") -> int:
        """The number of bytes sent."""
        return sum(size for verb, path, size in self.log if verb == method and containing in path)


class Answer(Exception):  # noqa: N818 - raised to end a request, successfully or not
    """The response to a request."""

    def __init__(self, status: int, body=None, **headers: str):
        self.status, self.body, self.headers = status, body, {k.replace("_", "-"): v for k, v in headers.items()}


def missing(code: str, status: int = 404, **more: str) -> Answer:
    return Answer(status, {"error": code}, X_Error_Code=code, X_Error_Message=code, **more)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer()

    do_GET = do_POST = do_PUT = do_HEAD  # noqa: N815

    def _answer(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) if self._has_body() else b""
        split = urlsplit(self.path)
        self.query = parse_qs(split.query)
        try:
            if self.server.broken:
                raise Answer(self.server.broken, {"error": "out of order"})
            for pattern, answer in ROUTES:
                method, _, path = pattern.partition(" ")
                match = re.fullmatch(path, split.path)
                if match and self.command in method.split("|"):
                    answer(self, **{key: unquote(value) for key, value in match.groupdict().items() if value})
                    raise AssertionError("a handler must raise an Answer")
            raise missing("NotFound")
        except Answer as answer:
            self._send(answer)

    def _has_body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            raise AssertionError("chunked bodies are not supported")
        if self.command == "PUT" and self.server.cut_upload:
            self.server.cut_upload = False
            self.close_connection = True
            self.connection.close()
            raise ConnectionAbortedError("cut on request")
        return True

    def _send(self, answer: Answer):
        raw = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body or {}).encode()
        size = int(answer.headers.pop("Content-Length", len(raw)))
        cut = self.server.cut_after.pop(0) if self._is_download() and self.server.cut_after else None
        body = b"" if self.command == "HEAD" else raw[:cut]
        self.send_response(answer.status)
        for key, value in answer.headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        self.wfile.write(body)
        self.server.log.append((self.command, self.path, len(body)))
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True

    def _is_download(self):
        return self.command == "GET" and ("/resolve/" in self.path or self.path.startswith("/large/"))

    # users and permissions

    def _user(self):
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in USERS:
            raise Answer(401, {"error": "x"}, X_Error_Message="Invalid credentials in Authorization header")
        return USERS.get(token)

    def _repo(self, name: str, *, write: bool = False) -> Repo:
        repo, user, owner = self.server.repos.get(name), self._user(), name.split("/")[-2]
        if repo is None or (repo.private and user != owner):
            raise missing("RepoNotFound", 404 if user else 401)
        if write and user != owner:
            raise Answer(403 if user else 401, {"error": "no"}, X_Error_Message="You don't have the rights")
        return repo

    def _commit(self, repo: Repo, revision: str) -> str:
        commit = repo.branches.get(revision, revision)
        if commit not in repo.commits:
            raise missing("RevisionNotFound")
        return commit

    # endpoints

    def create(self):
        request, user = json.loads(self.body), self._user()
        name = f"{request['organization']}/{request['name']}"
        if user is None:
            raise Answer(401, {"error": "Invalid username or password."})
        if user != request["organization"]:
            raise Answer(403, {"error": "You don't have the rights"}, X_Error_Message="You don't have the rights")
        if name in self.server.repos:
            raise Answer(409, {"error": "You already created this model repo"})
        private = request.get("visibility") == "private" or request.get("private", False)
        self.server.repos[name] = Repo(private=private)
        raise Answer(200, {"url": f"{self.server.endpoint}/{name}", "name": name})

    def info(self, name: str, revision: str = "main"):
        repo = self._repo(name)
        commit = self._commit(repo, revision)
        raise Answer(200, self._info(name, repo, commit, sizes="blobs" in self.query))

    def _info(self, name: str, repo: Repo, commit: str, *, sizes: bool):
        files = repo.commits[commit]
        more = {path: {"blobId": git_id(data), **entry(path, data)} if sizes else {} for path, data in files.items()}
        return {
            "id": name.removeprefix("datasets/"),
            "sha": commit,
            "private": repo.private,
            "gated": "auto" if repo.gated else False,
            "tags": self._tags(files.get("README.md", b"").decode()),
            "downloads": 7,
            "siblings": [{"rfilename": path, **about} for path, about in more.items()],
        }

    def tree(self, name: str, revision: str):
        repo = self._repo(name)
        files = repo.commits[self._commit(repo, revision)]
        folders = {"/".join(path.split("/")[:depth]) for path in files for depth in range(1, path.count("/") + 1)}
        entries = [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in sorted(folders)]
        for path, data in files.items():
            entries.append({"type": "file", "path": path, "oid": git_id(data), **entry(path, data)})
        raise Answer(200, entries)

    def _tags(self, card: str):
        match = re.match(r"---\n([\s\S]*?)\n---", card)
        data = (yaml.safe_load(match[1]) if match else None) or {}
        bases = data.get("base_model") or []
        bases = [bases] if isinstance(bases, str) else bases
        return [*data.get("tags", []), *(f"base_model:{base}" for base in bases)]

    def listed(self):
        tags, author = self.query.get("filter", []), self.query.get("author", [None])[0]
        models = []
        for name, repo in self.server.repos.items():
            info = self._info(name, repo, repo.branches["main"], sizes=False)
            matches = all(tag in info["tags"] for tag in tags) and (author is None or name.startswith(f"{author}/"))
            if matches and not repo.private and not name.startswith("datasets/"):
                models.append(info)
        raise Answer(200, models[: int(self.query.get("limit", ["100"])[0])])

    def branch(self, name: str, branch: str):
        repo = self._repo(name, write=True)
        repo.branches[branch] = repo.branches["main"]
        raise Answer(200, {})

    def preupload(self, name: str, revision: str):
        repo = self._repo(name, write=True)
        current = repo.commits[self._commit(repo, revision)]
        files = []
        for file in json.loads(self.body)["files"]:
            path, large = file["path"], is_large(file["path"], file["size"])
            data = current.get(path)
            oid = None if data is None else hashlib.sha256(data).hexdigest() if large else git_id(data)
            mode = "lfs" if large else "regular"
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        raise Answer(200, {"files": files})

    def batch(self, name: str):
        self._repo(name, write=True)
        objects = []
        for item in json.loads(self.body)["objects"]:
            upload = {"upload": {"href": f"{self.server.endpoint}/large/{item['oid']}", "header": {}}}
            exists = item["oid"] in self.server.objects
            objects.append({**item, **({} if exists else {"actions": upload})})
        raise Answer(200, {"objects": objects, "transfer": "basic"})

    def upload(self, oid: str):
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Answer(400, {"error": "other bytes"})
        self.server.objects[oid] = self.body
        self.server.uploads.append(oid)
        raise Answer(200, {})

    def commit(self, name: str, revision: str):
        repo = self._repo(name, write=True)
        lines = [json.loads(line) for line in self.body.splitlines()]
        header, new = lines[0]["value"], {}
        if header.get("parentCommit", repo.branches.get(revision)) != repo.branches.get(revision):
            raise Answer(412, {"error": "A commit has happened since"})
        for line in lines[1:]:
            value = line["value"]
            large = line["key"] == "lfsFile"
            new[value["path"]] = self.server.objects[value["oid"]] if large else base64.b64decode(value["content"])
        commit = self.server.put(name, new, revision)
        repo.messages.append(header["summary"])
        raise Answer(200, {"commitUrl": f"{self.server.endpoint}/{name}/commit/{commit}", "commitOid": commit})

    def validate(self):
        problems = card_problems(json.loads(self.body)["content"])
        raise Answer(
            400 if problems else 200, {"errors": [{"message": problem} for problem in problems], "warnings": []}
        )

    def resolve(self, name: str, revision: str, path: str):
        repo = self._repo(name)
        # The metadata of a gated repository is public, its files are not.
        if repo.gated and self._user() != name.split("/")[-2]:
            raise missing("GatedRepo", 403 if self._user() else 401)
        commit = self._commit(repo, revision)
        data = repo.commits[commit].get(path)
        if data is None:
            raise missing("EntryNotFound", X_Repo_Commit=commit)
        if not is_large(path, len(data)):
            self._part(data, ETag=f'"{git_id(data)}"', X_Repo_Commit=commit)
        digest = hashlib.sha256(data).hexdigest()
        location = f"http://localhost:{self.server.server_port}/large/{digest}"
        about = {"X_Linked_Etag": f'"{digest}"', "X_Linked_Size": str(len(data)), "X_Repo_Commit": commit}
        raise Answer(302, b"", Location=location, **about)

    def large(self, oid: str):
        if self.headers.get("Authorization"):
            self.server.leaked.append(self.path)
        data = self.server.objects[oid]
        if self.server.altered:
            data = data[:-1] + bytes([data[-1] ^ 1])
        self._part(data, ETag=f'"{oid}"')

    def _part(self, data: bytes, **headers: str):
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not match:
            raise Answer(200, data, Accept_Ranges="bytes", **headers)
        start, stop = int(match[1]), int(match[2]) + 1 if match[2] else len(data)
        raise Answer(206, data[start:stop], Content_Range=f"bytes {start}-{stop - 1}/{len(data)}", **headers)


ROUTES = [
    (r"POST /api/repos/create", Handler.create),
    (r"POST /api/validate-yaml", Handler.validate),
    (r"GET /api/models", Handler.listed),
    (rf"GET {API}(/revision/(?P<revision>[^/]+))?", Handler.info),
    (rf"GET {API}/tree/(?P<revision>[^/]+)", Handler.tree),
    (rf"POST {API}/branch/(?P<branch>[^/]+)", Handler.branch),
    (rf"POST {API}/preupload/(?P<revision>[^/]+)", Handler.preupload),
    (rf"POST {API}/commit/(?P<revision>[^/]+)", Handler.commit),
    (rf"POST /{REPOSITORY}\.git/info/lfs/objects/batch", Handler.batch),
    (r"PUT /large/(?P<oid>\w+)", Handler.upload),
    (r"GET /large/(?P<oid>\w+)", Handler.large),
    (rf"HEAD|GET /{REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
]
