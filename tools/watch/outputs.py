"""Events as lines of JSON to stdout, a rotated file, webhooks and MQTT. None of them ever holds up who sends."""

from __future__ import annotations

import http.client
import os
import ssl
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from vtx.runtime.errors import DeviceError, RequestError
from vtx.runtime.installing import install
from vtx.runtime.server.delivery import CLOSE_SECONDS, Output
from vtx.runtime.terminal.streams import drop_stdout
from vtx.tools.watch.config import FileOutput, Mqtt, WatchConfig, Webhook

LAST_WILL = b'{"event": "lost"}'  # which the broker publishes if the connection ends without a word


def open_outputs(config: WatchConfig) -> list[Output]:
    """The outputs of a configuration, stdout if it names none. Raises DeviceError without the library of one."""
    outputs = list[Output]()
    mqtt = None if config.mqtt is None else MqttClient(config.mqtt)  # the only one that may be refused
    if config.file is not None:
        outputs.append(Output(Path(config.file.path).name, RotatedFile(config.file).write))
    outputs += [Output(urlsplit(hook.url).netloc, Poster(hook).post, hook.queue) for hook in config.webhook]
    if config.mqtt is not None and mqtt is not None:
        outputs.append(Output(config.mqtt.host, mqtt.publish, config.mqtt.queue, mqtt.close))
    return outputs or [Output("stdout", _print)]


def _print(line: bytes) -> None:
    try:
        sys.stdout.write(line.decode() + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        drop_stdout()
        raise


class RotatedFile:
    """A file of whole lines. What a full disk cuts off is removed again, and the next line is tried."""

    def __init__(self, config: FileOutput) -> None:
        self._path = Path(config.path)
        self._most = int(config.max_mb * 1e6)
        self._keep = config.keep

    def write(self, line: bytes) -> None:
        """Append a line; a file that would exceed its limit is renamed first. Raises OSError."""
        line += b"\n"
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(file).st_size
            if size and size + len(line) > self._most:
                os.close(file)
                self._rotate()
                file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
                size = 0
            try:
                written = os.write(file, line)
            except OSError:
                os.ftruncate(file, size)
                raise
            if written < len(line):
                os.ftruncate(file, size)
                raise OSError(28, "no space left for a whole line")
        finally:
            os.close(file)

    def _rotate(self) -> None:
        def numbered(number: int) -> Path:
            return self._path.with_name(f"{self._path.name}.{number}") if number else self._path

        if not self._keep:
            self._path.unlink()
        for number in range(self._keep, 0, -1):
            if numbered(number - 1).exists():
                numbered(number - 1).replace(numbered(number))


class Poster:
    """Sends events to a URL by POST, each over a connection of its own."""

    def __init__(self, config: Webhook) -> None:
        self._config = config
        self._url = urlsplit(config.url)
        self._headers = {"Content-Type": "application/json", **(config.headers or {})}
        self._context = ssl.create_default_context() if self._url.scheme == "https" else None

    def post(self, line: bytes) -> None:
        """Send one. Raises RequestError for a status other than 2xx; OSError or HTTPException without an answer."""
        host = str(self._url.hostname)
        port = self._url.port
        seconds = self._config.timeout
        connection: http.client.HTTPConnection = (
            http.client.HTTPConnection(host, port, timeout=seconds)
            if self._context is None
            else http.client.HTTPSConnection(host, port, timeout=seconds, context=self._context)
        )
        try:
            target = (self._url.path or "/") + (f"?{self._url.query}" if self._url.query else "")
            connection.request("POST", target, line, self._headers)
            status = connection.getresponse().status
        finally:
            connection.close()
        if not 200 <= status < 300:
            raise RequestError(f"it answered with status {status}")


class MqttClient:
    """Publishes events at a topic, by paho, which connects again by itself."""

    def __init__(self, config: Mqtt) -> None:
        try:
            from paho.mqtt import client, enums
        except ImportError as e:
            raise DeviceError(f"sending events by MQTT needs paho; {install('mqtt')}") from e
        self._topic = config.topic
        self._last: client.MQTTMessageInfo | None = None
        self._client = client.Client(enums.CallbackAPIVersion.VERSION2)
        self._client.max_queued_messages_set(config.queue)
        if config.user is not None:
            self._client.username_pw_set(config.user, config.password)
        if config.tls:
            self._client.tls_set()
        self._client.will_set(self._topic, LAST_WILL, qos=1)
        self._client.connect_async(config.host, config.port)
        self._client.loop_start()

    def publish(self, line: bytes) -> None:
        """Send one at least once, when there is a connection. Raises RequestError if too many wait for one."""
        self._last = sent = self._client.publish(self._topic, line, qos=1)
        if sent.rc not in (0, 4):  # 4: not connected, so it waits
            raise RequestError(f"the broker's queue is full or closed (code {sent.rc})")

    def close(self) -> None:
        """Wait a moment for the last event to arrive, and disconnect."""
        if self._last is not None:
            with suppress(ValueError, RuntimeError):  # it was not sent
                self._last.wait_for_publish(CLOSE_SECONDS / 2)
        self._client.disconnect()
        self._client.loop_stop()
