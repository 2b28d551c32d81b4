"""Black boxes from outside: an .onnx file, and a service in a process of its own that can be stopped and started again."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_SERVER = """
import http.server, io, sys, time
import numpy as np

class Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        x = np.load(io.BytesIO(self.rfile.read(int(self.headers["Content-Length"]))))
        buffer = io.BytesIO()
        np.save(buffer, np.tanh(x) + np.float32(0.5))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(buffer.getvalue())
    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


class Service:
    """tanh(x) + 1/2 over HTTP on this machine."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", _SERVER, str(self.port)])
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise RuntimeError("the service did not start")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        buffer = io.BytesIO()
        np.save(buffer, x)
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}", buffer.getvalue(), timeout=10) as answer:
            return np.load(io.BytesIO(answer.read()))


def onnx_file(path: Path, matrix: np.ndarray, batch: int | str = "records", then: str = "Tanh") -> Path:
    """x @ matrix, and an activation, as a file. `batch` fixes the number of records per call."""
    from onnx import TensorProto, helper, numpy_helper, save

    n, m = matrix.shape
    nodes = [helper.make_node("MatMul", ["x", "matrix"], ["h"]), helper.make_node(then, ["h"], ["y"])]
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, length]) for name, length in (("x", n), ("y", m))]
    graph = helper.make_graph(
        nodes, "box", tensors[:1], tensors[1:], [numpy_helper.from_array(matrix.astype(np.float32), "matrix")]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    save(model, str(path))
    return path


class Sizes:
    """Notes how many records each call has."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.sizes = function, list[int]()

    def __call__(self, *arrays: Any) -> Any:
        self.sizes.append(len(arrays[0]))
        return self.function(*arrays)
