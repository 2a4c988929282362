"""A bucket in memory, seen by both clients of a run: fsspec (our files, Orbax's small ones) and TensorStore (arrays).

As in Google's storage, there are no folders, an object is there once its upload has ended, and nothing can be appended
to; renaming, which there means copying and deleting every object, is refused.
"""

import contextlib
import http.server
import importlib.machinery
import io
import json
import sys
import threading
import types
import urllib.parse

import fsspec

OBJECTS: dict[str, bytes] = {}  # "bucket/path" -> its bytes
_GENERATIONS: dict[str, int] = {}


def _store(name: str, value: bytes):
    _GENERATIONS[name] = _GENERATIONS.get(name, 0) + 1
    OBJECTS[name] = value


class _Upload(io.BytesIO):
    def __init__(self, name: str):
        super().__init__()
        self._name = name

    def close(self):
        if not self.closed:
            _store(self._name, self.getvalue())
        super().close()


class Files(fsspec.AbstractFileSystem):
    """What gcsfs is in earnest."""

    protocol = ("gs", "gcs")
    cachable = False

    def _open(self, path, mode="rb", **_):
        if mode == "wb":
            return _Upload(path)
        if mode != "rb":
            raise NotImplementedError(f"{path} opened with {mode}: objects cannot be appended to")
        if path not in OBJECTS:
            raise FileNotFoundError(path)
        return io.BytesIO(OBJECTS[path])

    def ls(self, path, detail=True, **_):
        path = self._strip_protocol(path).rstrip("/")
        found = {}
        for name, value in OBJECTS.items():
            if name == path:
                found[name] = {"name": name, "size": len(value), "type": "file"}
            elif name.startswith(f"{path}/"):
                child, deeper, _ = name[len(path) + 1 :].partition("/")
                kind = "directory" if deeper else "file"
                found[f"{path}/{child}"] = {"name": f"{path}/{child}", "size": len(value), "type": kind}
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else sorted(found)

    def mkdir(self, path, create_parents=True, **_):
        """A name with slashes is no folder."""

    makedirs = mkdir

    def rm(self, path, recursive=False, **_):
        path = self._strip_protocol(path)
        names = [name for name in OBJECTS if name == path or recursive and name.startswith(f"{path}/")]
        if not names:
            raise FileNotFoundError(path)
        for name in names:
            del OBJECTS[name]

    def mv(self, path1, path2, **_):
        raise NotImplementedError(f"{path1} renamed to {path2}")

    cp_file = copy = rename = mv


class _Handler(http.server.BaseHTTPRequestHandler):
    """The part of the JSON interface that TensorStore asks for."""

    protocol_version = "HTTP/1.1"

    def _answer(self, status: int, body: bytes = b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def _asked(self) -> tuple[str, dict[str, str]]:
        """("bucket/path" or "bucket/", the query)."""
        url = urllib.parse.urlsplit(self.path)
        bucket, _, name = url.path.partition("/b/")[2].partition("/o")
        query = dict(urllib.parse.parse_qsl(url.query))
        name = urllib.parse.unquote(name.removeprefix("/")) or query.get("name", "")
        return f"{bucket}/{name}", query

    def _described(self, name: str) -> dict:
        bucket, _, rest = name.partition("/")
        generation = str(_GENERATIONS[name])
        size = str(len(OBJECTS[name]))
        time = "2026-01-01T00:00:00Z"
        return {"name": rest, "bucket": bucket, "generation": generation, "size": size, "updated": time}

    def do_GET(self):
        name, query = self._asked()
        if name.endswith("/"):
            prefix = name + query.get("prefix", "")
            items = [self._described(found) for found in sorted(OBJECTS) if found.startswith(prefix)]
            return self._answer(200, json.dumps({"items": items}).encode())
        if name not in OBJECTS:
            return self._answer(404)
        if query.get("alt") != "media":
            return self._answer(200, json.dumps(self._described(name)).encode())
        whole, generation = OBJECTS[name], {"x_goog_generation": _GENERATIONS[name]}
        first, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        if not (first or last):
            return self._answer(200, whole, **generation)
        start = int(first) if first else len(whole) - int(last)
        end = min(int(last) + 1, len(whole)) if first and last else len(whole)
        span = f"bytes {start}-{end - 1}/{len(whole)}"
        return self._answer(206, whole[start:end], Content_Range=span, **generation)

    def do_POST(self):
        name, query = self._asked()
        body = self.rfile.read(int(self.headers["Content-Length"]))
        expected = query.get("ifGenerationMatch")
        if expected is not None and int(expected) != (_GENERATIONS[name] if name in OBJECTS else 0):
            return self._answer(412)
        _store(name, body)
        return self._answer(200, json.dumps(self._described(name)).encode())

    def do_DELETE(self):
        return self._answer(204 if OBJECTS.pop(self._asked()[0], None) is not None else 404)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(monkeypatch):
    """Within it ``gs://`` paths lead to :data:`OBJECTS`."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
    for name in Files.protocol:
        fsspec.register_implementation(name, Files, clobber=True)
    # Orbax asks Google's own client whether a bucket has folders.
    client = types.SimpleNamespace(get_bucket=lambda name: types.SimpleNamespace(hierarchical_namespace_enabled=False))
    storage = types.ModuleType("google.cloud.storage")
    storage.Client = lambda: client
    cloud = types.ModuleType("google.cloud")
    cloud.storage = storage
    gcsfs = types.ModuleType("gcsfs")
    gcsfs.__spec__ = importlib.machinery.ModuleSpec("gcsfs", None)
    for module in (cloud, storage, gcsfs):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    OBJECTS.clear()
    try:
        yield OBJECTS
    finally:
        server.shutdown()
        server.server_close()
