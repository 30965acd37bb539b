"""ClientApps and networks that worker processes import by name."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.util import Finalize
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from raceme.core.messages import from_array, to_array

app = ClientApp()


@app.query("echo")
def echo(message: Message, context: Context) -> Message:
    """Echo the content, with the id of the answering process."""
    content = message.content
    content["who"] = ConfigRecord({**context.node_config, "run": context.run_config["name"]})
    return Message(content, reply_to=message)


@app.query("double")
def double(message: Message, context: Context) -> Message:
    """Send back every array times two."""
    doubled = {
        name: ArrayRecord({key: to_array(from_array(array) * 2) for key, array in record.items()})
        for name, record in message.content.array_records.items()
    }
    return Message(RecordDict(doubled), reply_to=message)


@app.query("count")
def count(message: Message, context: Context) -> Message:
    """Count messages in the client's state, and sum up `step`."""
    state = context.state.metric_records.get("seen", MetricRecord({"n": 0, "sum": 0}))
    step = int(message.content["config"]["step"])
    state = MetricRecord({"n": state["n"] + 1, "sum": 10 * state["sum"] + step})
    context.state["seen"] = state
    return Message(RecordDict({"metrics": state.copy()}), reply_to=message)


@app.query("tidy")
def tidy(message: Message, context: Context) -> Message:
    """Register work for the end of the process, as a lock of `multiprocessing` does."""
    mark = Path(str(message.content["config"]["mark"]))
    Finalize(None, mark.touch, exitpriority=1)
    return Message(RecordDict(), reply_to=message)


@app.query("delegate")
def delegate(message: Message, context: Context) -> Message:
    """Let a child process do the work, like a DataLoader with workers."""
    touch = Path(str(message.content["config"]["mark"])).touch
    process = multiprocessing.Process(target=touch, daemon=True)
    process.start()
    process.join()
    method = ConfigRecord({"method": multiprocessing.get_start_method()})
    return Message(RecordDict({"start": method}), reply_to=message)


@app.query("fail")
def fail(message: Message, context: Context) -> Message:
    """Raise."""
    raise ValueError("this client cannot")


@app.query("die")
def die(message: Message, context: Context) -> Message:
    """Kill the process."""
    os._exit(7)


@app.query("stumble")
def stumble(message: Message, context: Context) -> Message:
    """Kill the process the first time, and answer the second time."""
    mark = Path(str(message.content["config"]["mark"]))
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return Message(message.content, reply_to=message)


def with_dropout(input_shape: tuple[int, ...], num_classes: int) -> object:
    """Build a network with random numbers in it."""
    # Imported here, since torch takes long to import and the apps do not use it.
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, num_classes))


def __getattr__(name: str) -> ClientApp:
    """End any process that looks up `vanishing`."""
    if name == "vanishing":
        os._exit(3)
    raise AttributeError(name)
