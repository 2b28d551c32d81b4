"""A service over HTTP in the middle of a model. When it is down, the step says so, and the run goes on once it is back.

What one learns: requests hold many records and go out side by side; a call that fails or hangs is tried again, later each time. The
service sees what the layers before it make of private records, in the clear (docs/pitfalls.md): here it runs on this machine.
"""

from __future__ import annotations

import http.server
import io
import threading
import urllib.request

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpulr


class Answer(http.server.BaseHTTPRequestHandler):
    """The cosine of each number."""

    def do_POST(self) -> None:
        x, answer = np.load(io.BytesIO(self.rfile.read(int(self.headers["Content-Length"])))), io.BytesIO()
        np.save(answer, np.cos(x))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer.getvalue())

    def log_message(self, *_: object) -> None: ...


def main(steps: int = 40) -> tuple[dpulr.PrivacyEngine, float]:
    """Is a point within a ring? Train on both sides of the service; return the engine, and the accuracy on the training records."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def ask(x: np.ndarray) -> np.ndarray:
        body = io.BytesIO()
        np.save(body, x)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}", body.getvalue()) as answer:
            return np.load(io.BytesIO(answer.read()))

    data = TensorDataset(x := torch.randn(3_000, 2), (x.norm(dim=1) < 1.2).long())
    box = dpulr.BlackBox(ask, (16,), name="cosines", batch_size=2_000, concurrency=4, timeout=10.0, retries=3)
    model = nn.Sequential(nn.Linear(2, 16), box, nn.Linear(16, 2))
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), nn.CrossEntropyLoss(reduction="none")
    how = dpulr.HiddenDirection(repeats=4, exact="auto")
    engine = dpulr.PrivacyEngine(model, optimizer, data, loss, mechanism=how, batch_size=300, steps=steps, target_epsilon=3.0)
    for batch in engine.batches():
        engine.step(*batch)
    accuracy = dpulr.evaluate(model, data)
    print(f"epsilon {engine.privacy_spent().epsilon:.2f}; exact: {engine.mechanism.exact}; accuracy {accuracy:.3f}")
    return engine, accuracy


if __name__ == "__main__":
    main()
