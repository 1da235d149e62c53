"""A proxy in front of an HTTP server, for tests: it delays each request, counts requests and bytes,
and fails when it is told to.

python tests/support/slow_proxy.py PORT [MILLISECONDS] runs one in front of a port of this machine
until Ctrl-C, and prints what went through it.
"""

import contextlib
import http.client
import http.server
import signal
import sys
import threading
import time


class SlowProxy:
    """A proxy of a server on this machine.

    Args:
      port: the server's.
      delay_s: seconds before each request is passed on.

    failing: "": it works; "closed": a connection is closed without an answer; "503": a refusal that
    may pass; "hung": no answer comes.
    """

    def __init__(self, port: int, delay_s: float = 0.02):
        self.delay_s, self.failing = delay_s, ""
        self.requests = self.sent = self.failed = 0
        self._lock, self._target = threading.Lock(), port
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def forget(self) -> None:
        """Counts from 0."""
        self.requests = self.sent = self.failed = 0

    def __enter__(self) -> "SlowProxy":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                time.sleep(proxy.delay_s)
                if proxy.failing:
                    proxy.failed += 1
                    self.fail(proxy.failing)
                    return
                server = http.client.HTTPConnection("127.0.0.1", proxy._target, timeout=60)
                with contextlib.closing(server):
                    server.putrequest(
                        self.command, self.path, skip_host=True, skip_accept_encoding=True
                    )
                    for name, value in self.headers.items():
                        server.putheader(name, value)
                    server.endheaders(body)
                    answer = server.getresponse()
                    content = answer.read()
                self.send_response_only(answer.status, answer.reason)
                length = answer.getheader("Content-Length", str(len(content)))
                for name, value in answer.getheaders():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                self.send_header("Content-Length", length)
                self.end_headers()
                self.wfile.write(content)
                with proxy._lock:
                    proxy.requests += 1
                    proxy.sent += len(content)

            def fail(self, how: str) -> None:
                if how == "hung":
                    while proxy.failing:
                        time.sleep(0.1)
                if how == "503":
                    self.send_response(503)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                self.close_connection = how != "503"

            def log_message(self, *_: object) -> None:
                pass

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        return Handler


def main(port: str, milliseconds: str = "20") -> None:
    with SlowProxy(int(port), float(milliseconds) / 1e3) as proxy:
        print(proxy.endpoint, flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
        print(f"{proxy.requests} requests, {proxy.sent / 1e6:.1f} MB")


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main(*sys.argv[1:])
