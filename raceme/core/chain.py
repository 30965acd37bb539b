"""The chain of a run's features on the server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from flwr.app import RecordDict

from raceme.core.errors import UserError
from raceme.core.feature import Feature, FeatureContext, Refusal
from raceme.core.messages import ModelSpec
from raceme.core.registry import FEATURES
from raceme.core.requests import InFlight, InvalidReplyError, Outcome, Request, Update
from raceme.core.scheduling import check_kind, from_tree, to_tree

if TYPE_CHECKING:
    from raceme.core.config import RunConfig


class Chain:
    """The features of a run, in order.

    Parameters
    ----------
    features : Mapping[str, Feature]
        Features by name.
    """

    def __init__(self, features: Mapping[str, Feature] | None = None) -> None:
        self._features = dict(features or {})
        for name, feature in self._features.items():
            check_kind(feature.state_type, f"the state of {name}")
        self._each: Iterable[Feature] = self._features.values()
        self._context: FeatureContext | None = None

    @classmethod
    def of(cls, config: RunConfig) -> Chain:
        """Make the features of a configuration.

        Raises
        ------
        UserError
            A name does not exist, or an option is out of its range.
        """
        made = {name: made_of(config, name) for name in config.feature_names}
        return cls({name: feature for name, feature in made.items() if feature.is_on})

    @property
    def keeps_bases(self) -> bool:
        """Whether a feature needs the models that clients train from."""
        return any(feature.keeps_bases for feature in self._each)

    @property
    def upload_size(self) -> float:
        """Size of trained models on their way to the server, as a share."""
        return prod(feature.upload_size for feature in self._each)

    @property
    def settings(self) -> frozenset[str]:
        """Settings that features add to requests."""
        return frozenset().union(*(feature.settings for feature in self._each))

    @property
    def holds(self) -> Callable[[str], bool] | None:
        """Whether an idle client gets no work yet; None if no feature ever holds any."""
        holding = [one for one in self._each if type(one).holds is not Feature.holds]
        if not holding:
            return None
        return lambda client: any(one.holds(client, self._connected) for one in holding)

    def begin(self, context: FeatureContext) -> None:
        """Connect the features with a run."""
        self._context = context

    def request(self, request: Request) -> Request:
        """Return a request as the features change it."""
        for feature in self._each:
            request = feature.on_request(request, self._connected)
        return request

    def reply(self, content: RecordDict) -> RecordDict:
        """Return the content of a reply to training as it is read.

        Raises
        ------
        InvalidReplyError
            A feature refuses it.
        """
        for feature in self._each:
            content = feature.on_reply(content)
        return content

    def update(self, update: Update) -> Update:
        """Return a valid update as the features change it.

        Raises
        ------
        InvalidReplyError
            A feature refuses the update.
        """
        for feature in self._each:
            found = feature.on_update(update, self._connected)
            if isinstance(found, Refusal):
                raise InvalidReplyError(found.reason)
            update = found
        return update

    def applied(self, updates: Sequence[Update], outcomes: Sequence[Outcome]) -> None:
        """Inform the features of an aggregation."""
        for feature in self._each:
            feature.on_applied(updates, outcomes, self._connected)

    def closed(self, task: InFlight) -> None:
        """Inform the features of the end of a task."""
        for feature in self._each:
            feature.on_closed(task, self._connected)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the features by name.

        Raises
        ------
        UserError
            A state has values of other types than annotated.
        """
        tree = {}
        for name, feature in self._features.items():
            try:
                tree[name] = to_tree(feature.state)
                if not FEATURES.is_own(name):
                    # Told now rather than when the run is resumed.
                    from_tree(feature.state_type, tree[name])
            except (TypeError, ValueError) as error:
                raise UserError(f"the state of {name} is invalid: {error}") from None
        return tree

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned.

        Raises
        ------
        ValueError
            The states are of other features.
        """
        if tree.keys() != self._features.keys():
            raise ValueError(f"the state is of {sorted(tree)}, not {sorted(self._features)}")
        for name, feature in self._features.items():
            feature.state = from_tree(feature.state_type, tree[name])

    def restored(self, spec: ModelSpec) -> None:
        """Let the features check their loaded states.

        Raises
        ------
        ValueError
            A state does not fit the run's models.
        """
        for feature in self._each:
            feature.restored(spec)

    @property
    def _connected(self) -> FeatureContext:
        assert self._context is not None, "the loop connects the features"
        return self._context


def made_of(config: RunConfig, name: str) -> Feature:
    """Make a feature with the options of a configuration."""
    kind = FEATURES.options_type(name)
    assert kind is not None, "every feature has options"
    made: Feature = FEATURES.make(name, config.read(kind, FEATURES.prefix(name)), config)
    return made
