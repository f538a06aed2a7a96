"""JSON over HTTP to an inference server: one POST, tried again when the server is busy or away."""

from __future__ import annotations

import http.client
import json
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from jobs.rollout.config import ServerConfig
from jobs.rollout.engine import EngineError
from schemas.errors import ConfigError, RowError
from schemas.wording import one_line

REFUSED = (400, 413, 422)  # this request; another may do
BUSY = (408, 429, 500, 502, 503, 504)
FIRST_WAIT_S = 0.5
SAID = 300  # characters of a server's message

log = logging.getLogger("omniloom.rollouts")


@dataclass(frozen=True)
class JsonServer:
    """Where to post. timeout_s: of one try, until its answer is there as a whole; token: sent as bearer. Usable from
    several threads: each request has its own connection."""

    url: str
    timeout_s: float
    retries: int
    token: str | None = None
    first_wait_s: float = FIRST_WAIT_S

    @classmethod
    def of(cls, config: ServerConfig) -> JsonServer:
        """ConfigError: the variable with the token is not set."""
        assert config.url is not None  # the configuration checks it
        token = None
        if config.api_key_variable is not None:
            token = os.environ.get(config.api_key_variable)
            if not token:
                raise ConfigError(f"rollouts.server.api_key_variable: {config.api_key_variable} is not set")
        return cls(config.url.rstrip("/"), config.timeout_s, config.retries, token)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer. RowError: the server refuses this request; EngineError: it does not answer, or says no for
        another reason."""
        data = json.dumps(body).encode()
        wait_s = self.first_wait_s
        for attempt in range(self.retries + 1):
            try:
                status, said = self._once(path, data)
            except (OSError, http.client.HTTPException) as error:
                status, said = None, f"{type(error).__name__}: {one_line(error)}".encode()
            if status == 200:
                return self._parsed(path, said)
            text = one_line(said.decode(errors="replace"))[:SAID]
            if status in REFUSED:
                raise RowError("bad_row", f"{self.url}{path} refuses the request ({status}): {text}")
            if status is not None and status not in BUSY:
                raise EngineError(f"{self.url}{path} answers {status}: {text}")
            if attempt < self.retries:
                log.warning("%s%s: %s; trying again in %.1f s", self.url, path, text, wait_s)
                time.sleep(wait_s)
                wait_s *= 2
        raise EngineError(
            f"{self.url}{path} did not answer in {self.retries + 1} tries: {text}; the same command goes on from here"
        )

    def _once(self, path: str, data: bytes) -> tuple[int, bytes]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None  # the configuration checks it
        if parts.scheme == "https":
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=self.timeout_s, context=ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=self.timeout_s)
        headers = {"Content-Type": "application/json"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        try:
            connection.connect()
            with _within(self.timeout_s, connection.sock):
                connection.request("POST", parts.path.rstrip("/") + path, data, headers)
                answer = connection.getresponse()
                return answer.status, answer.read()
        finally:
            connection.close()

    def _parsed(self, path: str, said: bytes) -> Any:
        try:
            return json.loads(said)
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{self.url}{path} answers with no JSON: {one_line(error)}") from error


@contextmanager
def _within(seconds: float, connection: socket.socket) -> Iterator[None]:
    """TimeoutError for a block that takes longer, which is ended by ending its connection: the timeout of a socket is
    that of a single read, and a server may send a byte now and then."""
    late = threading.Event()

    def end() -> None:
        late.set()
        with suppress(OSError):  # it has ended by itself
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        if late.is_set():
            raise TimeoutError(f"no whole answer in {seconds:g} s") from error
        raise
    finally:
        timer.cancel()
    if late.is_set():  # an answer of no declared length ends with its connection
        raise TimeoutError(f"no whole answer in {seconds:g} s")
