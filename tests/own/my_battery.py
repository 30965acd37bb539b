"""Clients report their battery, and train one epoch only when it is low."""

from dataclasses import dataclass, field, replace

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable

from raceme.core.events import MeasureSchema
from raceme.core.feature import Feature, FeatureContext
from raceme.core.options import option
from raceme.core.requests import Request, Update

BATTERY = MeasureSchema(
    "battery", "battery of clients", ("client", "battery"), value="battery", unit="%"
)


@dataclass(frozen=True)
class BatteryOptions:
    """Keys, `battery.low` and `battery.use`."""

    low: float = option(
        20.0, "per cent below which a client trains a single epoch", low=0, high=100
    )
    use: float = option(
        1.0, "per cent that a training takes, where the device does not tell", low=0
    )


@dataclass
class BatteryState:
    """The last report of each client."""

    levels: dict[str, float] = field(default_factory=dict)


class Battery(Feature):
    """Clients report their battery (an example)."""

    options_type = BatteryOptions
    state_type = BatteryState
    client = "my_battery:report"

    def on_request(self, request: Request, context: FeatureContext) -> Request:
        """Ask a client with a low battery for one epoch."""
        if self.state.levels.get(request.client, 100.0) >= self.options.low:
            return request
        return replace(request, settings={**request.settings, "local-epochs": 1})

    def on_update(self, update: Update, context: FeatureContext) -> Update:
        """Note the battery that a client reports."""
        level = update.metrics.get("battery")
        if level is not None:
            self.state.levels[update.task.client] = level
            context.measure(BATTERY, client=update.task.client, battery=level)
        return update


def report(
    message: Message, context: Context, call_next: ClientAppCallable, options: BatteryOptions
) -> Message:
    """Add the battery to the metrics of the reply: here, of a device that counts its trainings."""
    reply = call_next(message, context)
    if not reply.has_error():
        count = int(context.state.config_records.get("battery", {"count": 0})["count"]) + 1
        context.state["battery"] = ConfigRecord({"count": count})
        reply.content["metrics"]["battery"] = 100.0 - options.use * count
    return reply
